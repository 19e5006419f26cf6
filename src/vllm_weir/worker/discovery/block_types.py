"""Blocks of one make: where the points of one were found, they are looked for first in the next.

The search tries hundreds of sums a block, which on a device takes longer than loading many a model. Blocks whose
parts were called alike have their points in the same places; that they are there is checked in each by arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from vllm_weir.worker.discovery.anchors import Anchor
from vllm_weir.worker.discovery.matcher import Matcher
from vllm_weir.worker.discovery.recorder import ModuleCall, value_at
from vllm_weir.worker.discovery.resolve import BlockPoints, StreamPorts, resolve_block, stream_through

SEARCHES = 3
"""Blocks of one make that are searched in vain before the others are taken to have no points either."""


class BlockTypes:
    """The points of all blocks in one recorded pass, for one choice of what carries the stream.

    Args:
        ports, cores, is_plain, m: as in `resolve_block`.
    """

    def __init__(self, ports: StreamPorts, cores: set[str], is_plain: Callable[[str], bool], m: Matcher) -> None:
        self._ports, self._cores, self._plain, self._m = ports, cores, is_plain, m
        self._found: dict[tuple, tuple[str, BlockPoints]] = {}
        self._vain: dict[tuple, list[BlockPoints]] = {}

    def points(self, calls: Sequence[ModuleCall]) -> BlockPoints:
        """The points of the block whose calls these are, its own first."""
        path, make = calls[0].path, self._make(calls)
        if make in self._found:
            before, points = self._found[make]
            moved = self._moved(points, before, calls)
            if moved is not None:
                return moved
        vain = self._vain.setdefault(make, [])
        if len(vain) == SEARCHES:
            return replace(vain[0], refused=dict(vain[0].refused))
        points = resolve_block(calls, self._ports, self._cores, self._plain, self._m)
        if points.complete:
            self._found[make] = path, points
        elif not points.proven and make not in self._found:
            vain.append(points)
        return points

    def _make(self, calls: Sequence[ModuleCall]) -> tuple:
        """What two blocks must have in common: the parts that were called, their order, and their tensors' shapes."""
        start = calls[0].start
        return tuple(
            (
                *(c.local, c.start - start, c.end - start, c.path in self._cores, self._plain(c.path)),
                *(tuple(keys) for keys in (c.args, c.out, c.after, c.offsets)),
                *(tuple(sorted(c.shapes.items())),),
            )
            for c in calls
        )

    def _moved(self, points: BlockPoints, before: str, calls: Sequence[ModuleCall]) -> BlockPoints | None:
        """The same points in another block, if they are there; None where the search has to tell."""
        pre, post = stream_through(calls[0], self._ports)
        if pre is None or post is None or points.gain != 1:
            return None
        anchors: dict[str, Anchor] = {}
        for hook, anchor in points.anchors.items():
            moved = _to(anchor, before, calls[0].path)
            if moved is None:
                return None
            anchors[hook] = moved
        a, mid, o = (anchors.get(hook) for hook in ("attn_out", "resid_mid", "mlp_out"))
        if a is None or o is None:
            return None
        one, other = (value_at(calls, replace(anchor, scale=1.0)) for anchor in (a, o))
        if one is None or other is None:
            return None
        scales: tuple[float | None, float | None] | None
        if points.kind == "sequential":
            middle = None if mid is None else value_at(calls, mid)
            if middle is None or self._m.same(middle, pre) or self._m.same(middle, post):
                return None
            scales = self._m.factor(one, middle - pre), self._m.factor(other, post - middle)
        else:
            scales = self._m.factors(one, other, post - pre)
        for hook, anchor, scale in zip(("attn_out", "mlp_out"), (a, o), scales or (None, None), strict=True):
            if scale is None or (scale == 1) != (anchor.scale == 1):
                return None
            anchors[hook] = replace(anchor, scale=scale)
        return replace(points, anchors=anchors, refused=dict(points.refused))


def _to(anchor: Anchor, before: str, now: str) -> Anchor | None:
    """The same place in the block at path `now`; None if it is not within the block at `before` alone."""
    if anchor.beside is not None or not f"{anchor.module}.".startswith(f"{before}."):
        return None
    return replace(anchor, module=now + anchor.module.removeprefix(before))
