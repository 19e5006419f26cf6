"""Candidates for what attention or MLP adds: recorded tensors, and which to prefer.

A search in `resolve` tries candidates against an equation of the block. Those that fit are a
`Match` (one tensor, with a factor) or a `MatchPair` (the sum of two). Several may fit, since a
module and the part of it that computes its result return the same tensor: `preference` decides
between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from vllm_weir.worker.discovery.anchors import AddedTerm, Anchor, ModuleCall, TensorKey


@dataclass(frozen=True)
class CandidateTensor:
    """A tensor that a call produced or was given, plus the bias `offset` of its output, if any."""

    call: ModuleCall
    when: Literal["before", "after"]
    key: TensorKey
    value: torch.Tensor
    offset: TensorKey | None = None

    @property
    def time(self) -> int:
        """Time at which the tensor exists: the end of the call, or its start."""
        return self.call.end if self.when == "after" else self.call.start

    @property
    def child(self) -> str:
        """The child of the block that the call belongs to; "" for the block's own call."""
        return self.call.local_path.split(".")[0]

    def anchor(self, scale: float = 1.0) -> Anchor:
        return Anchor(self.call.path, self.when, self.key, None, scale, None, self.offset)


@dataclass(frozen=True)
class Match:
    """A candidate that fits an equation, and its factor in it."""

    candidate: CandidateTensor
    scale: float

    def anchor(self) -> Anchor:
        return self.candidate.anchor(self.scale)

    @property
    def preference(self) -> tuple:
        """Sort key, preferred first: unscaled, after a call, in the outermost module, earliest."""
        candidate = self.candidate
        # The block's own results come last: a tap on a part acts before those on the block.
        depth = candidate.call.local_path.count(".") if candidate.call.local_path else 1 << 20
        return self.scale != 1.0, candidate.when != "after", depth, candidate.time


@dataclass(frozen=True)
class MatchPair:
    """Two candidates whose weighted sum fits an equation."""

    one: Match
    other: Match

    @property
    def in_order(self) -> tuple[Match, Match]:
        first, last = sorted((self.one, self.other), key=lambda match: match.candidate.time)
        return first, last

    def anchor(self) -> Anchor:
        first, last = self.in_order
        term = AddedTerm(first.candidate.call.path, first.candidate.key, first.scale)
        return Anchor(last.candidate.call.path, "after", last.candidate.key, None, last.scale, term)

    @property
    def preference(self) -> tuple:
        """Sort key, preferred first: compare the less preferred member, then the other."""
        return max(self.one.preference, self.other.preference), min(self.one.preference, self.other.preference)


def results_of(call: ModuleCall) -> Iterator[CandidateTensor]:
    """Yield the results of a call, each also with every bias that the call returns."""
    for key, value in call.results.items():
        yield CandidateTensor(call, "after", key, value)
        for vector, offset in call.offsets.items():
            yield CandidateTensor(call, "after", key, value + offset, vector)


@dataclass(frozen=True)
class StreamInput:
    """What a call inside a block is given: one argument, or the sum of two."""

    call: ModuleCall
    hidden: TensorKey
    residual: TensorKey | None
    value: torch.Tensor

    def anchor(self) -> Anchor:
        return Anchor(self.call.path, "before", self.hidden, self.residual)


def inputs_of(calls: Sequence[ModuleCall], after: int) -> Iterator[StreamInput]:
    """Yield what the calls that start at or after time `after` are given, earliest first."""
    for call in sorted(calls, key=lambda c: c.start):
        if call.start < after:
            continue
        keys = list(call.args)
        if len(keys) == 2 and call.args[keys[0]].shape == call.args[keys[1]].shape:
            yield StreamInput(call, keys[0], keys[1], call.args[keys[0]] + call.args[keys[1]])
        for key in keys:
            yield StreamInput(call, key, None, call.args[key])
