"""What a request asks of the engine, in the form in which it travels to the scheduler and the workers.

There it is one run of bytes that equal requests have in common: vLLM hands it on without looking into it, and every
process reads it once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import msgspec

from vllm_weir.schema.instructions import ResolvedIntervention
from vllm_weir.schema.positions import ENDLESS, Positions
from vllm_weir.schema.request import ResolvedSpec
from vllm_weir.util.lru import LruCache


@dataclass(frozen=True)
class EngineSpec:
    """The captures, and the interventions that change something, in order."""

    captures: ResolvedSpec
    moves: tuple[ResolvedIntervention, ...] = ()

    @functools.cached_property
    def selectors(self) -> tuple[Positions, ...]:
        """The distinct selectors of both."""
        return tuple(dict.fromkeys([*self.captures.positions, *(m.positions for m in self.moves)]))

    @functools.cached_property
    def end(self) -> int:
        """The shortest prompt with which no generated position can be selected.

        Finer bounds would not do: past the prompt, the scheduler's count of computed tokens may run ahead of the
        device's.
        """
        return max([0, *map(_end_of, self.selectors)])

    @functools.cached_property
    def places(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Hook points and their blocks."""
        layers: dict[str, list[int]] = {}
        for hook, layer in self.captures.sites:
            layers.setdefault(hook, []).append(layer)
        return tuple([(hook, tuple(some)) for hook, some in layers.items()] + [(m.hook, m.layers) for m in self.moves])

    @functools.cached_property
    def wire(self) -> bytes:
        """What travels."""
        moves = [m.to_wire() for m in self.moves]
        return msgspec.msgpack.encode([self.captures.wire, self.captures.postprocess_wire, moves])

    @classmethod
    def from_wire(cls, wire: bytes) -> EngineSpec:
        """The inverse of `wire`; the same object for equal bytes, as long as it is remembered."""
        known = _known.get(wire)
        if known is None:
            site_requests, postprocess, moves = msgspec.msgpack.decode(wire)
            known = cls(
                ResolvedSpec.from_wire(site_requests, postprocess), tuple(map(ResolvedIntervention.from_wire, moves))
            )
            _known.put(wire, known, 2048 + 16 * len(wire) + 256 * len(known.captures.site_requests))
        return known


def _end_of(selector: Positions) -> int:
    if selector.kind in ("prompt", "last_prompt"):
        return 0
    if selector.kind == "list":
        return max(selector.numbers, default=-1) + 1
    if selector.kind == "slice" and selector.values[1] is not None:
        return selector.values[1]
    return ENDLESS


_known: LruCache[EngineSpec] = LruCache(64 << 20)
