"""Tensors that may be a hook point, alone or two together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from vllm_weir.worker.discovery.anchors import AddedTerm, Anchor, TensorKey
from vllm_weir.worker.discovery.recorder import ModuleCall


@dataclass(frozen=True)
class CandidateTensor:
    """A tensor that a call leaves behind, or is given; with an offset, plus a vector that it returns."""

    call: ModuleCall
    when: Literal["before", "after"]
    key: TensorKey
    value: torch.Tensor
    offset: TensorKey | None = None

    @property
    def time(self) -> int:
        return self.call.end if self.when == "after" else self.call.start

    @property
    def part(self) -> str:
        """The child of the block that it belongs to."""
        return self.call.local.split(".")[0]

    def anchor(self, scale: float = 1.0) -> Anchor:
        return Anchor(self.call.path, self.when, self.key, None, scale, None, self.offset)


@dataclass(frozen=True)
class Match:
    """A source that makes up a difference, and the factor with which it does."""

    source: CandidateTensor
    scale: float

    def anchor(self) -> Anchor:
        return self.source.anchor(self.scale)


@dataclass(frozen=True)
class MatchPair:
    """Two sources that make up a difference together, each with a factor."""

    one: Match
    other: Match

    def anchor(self) -> Anchor:
        """At the one that comes later."""
        first, last = sorted((self.one, self.other), key=lambda f: f.source.time)
        beside = AddedTerm(first.source.call.path, first.source.key, first.scale)
        return Anchor(last.source.call.path, "after", last.source.key, None, last.scale, beside)

    @property
    def rank(self) -> tuple:
        """Sorts the likelier first."""
        return max(rank(self.one), rank(self.other)), min(rank(self.one), rank(self.other))


def rank(found: Match) -> tuple:
    """Sorts the likelier first: unscaled before scaled, then the outermost, then the earliest."""
    source = found.source
    # The block's own results come last: a hook on a part of the block stands before those on the whole.
    depth = source.call.local.count(".") if source.call.local else 1 << 20
    return found.scale != 1.0, source.when != "after", depth, source.time
