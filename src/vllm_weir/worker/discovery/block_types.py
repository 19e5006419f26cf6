"""The points of all blocks: solve one block of each type, and copy its points to the others.

The search in `resolve` tries hundreds of sums a block. Blocks of one type (the same parts, called
in the same order, with tensors of the same shapes) usually have their points in the same places:

1. For a block whose type was solved, move the anchors to this block, and check the block's equation
   there. If it holds, these are its points, with factors of its own.
2. If not, or if the type is new, search. A complete result becomes the solution of the type.
3. After `SEARCHES` searches of a type that found nothing, assume that its other blocks have no
   points either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from vllm_weir.worker.discovery.anchors import Anchor, ModuleCall, value_at
from vllm_weir.worker.discovery.block_stack import BlockPoints
from vllm_weir.worker.discovery.matcher import Matcher
from vllm_weir.worker.discovery.resolve import resolve_block
from vllm_weir.worker.discovery.stream_ports import StreamPorts

SEARCHES = 3
"""Blocks of one type that are searched before the type is taken to have no points."""


class BlockTypes:
    """The solutions by type of block, for one recorded pass and one choice of ports.

    `only_scales`: whether a module, by path, has no matrix.
    """

    def __init__(
        self, ports: StreamPorts, mixers: set[str], only_scales: Callable[[str], bool], matcher: Matcher
    ) -> None:
        self._ports, self._mixers, self._only_scales, self._matcher = ports, mixers, only_scales, matcher
        self._solved: dict[tuple, tuple[str, BlockPoints]] = {}
        """Type -> path of the block that was solved, and its points."""
        self._failed: dict[tuple, list[BlockPoints]] = {}
        """Type -> results of the searches that explained nothing."""

    def points(self, calls: Sequence[ModuleCall]) -> BlockPoints:
        """Return the points of the block with these calls, the block's own first."""
        block_type = self._type_of(calls)
        if block_type in self._solved:
            copied = self._copied(*self._solved[block_type], calls)
            if copied is not None:
                return copied
        failed = self._failed.setdefault(block_type, [])
        if len(failed) == SEARCHES:
            return replace(failed[0], refused=dict(failed[0].refused))
        points = resolve_block(calls, self._ports, self._mixers, self._only_scales, self._matcher)
        if points.complete:
            self._solved[block_type] = calls[0].path, points
        elif not points.explained and block_type not in self._solved:
            failed.append(points)
        return points

    def _type_of(self, calls: Sequence[ModuleCall]) -> tuple:
        """Return what blocks of one type share: parts, order of calls, and shapes of tensors."""
        start = calls[0].start
        return tuple(
            (
                *(c.local_path, c.start - start, c.end - start, c.path in self._mixers, self._only_scales(c.path)),
                *(tuple(keys) for keys in (c.args, c.outputs, c.args_after, c.offsets)),
                tuple(sorted(c.shapes.items())),
            )
            for c in calls
        )

    def _copied(self, solved_path: str, solved: BlockPoints, calls: Sequence[ModuleCall]) -> BlockPoints | None:
        """Return the same points in another block, or None if it has to be searched itself."""
        if solved.gain != 1:
            return None
        anchors: dict[str, Anchor] = {}
        for hook, anchor in solved.anchors.items():
            moved = _moved(anchor, solved_path, calls[0].path)
            if moved is None:
                return None
            anchors[hook] = moved
        scales = self._scales(solved.kind, anchors, calls)
        if scales is None:
            return None
        for hook, scale in zip(("attn_out", "mlp_out"), scales, strict=True):
            if scale is None or (scale == 1) != (anchors[hook].scale == 1):
                return None
            anchors[hook] = replace(anchors[hook], scale=scale)
        return replace(solved, anchors=anchors, refused=dict(solved.refused))

    def _scales(
        self, kind: str, anchors: dict[str, Anchor], calls: Sequence[ModuleCall]
    ) -> tuple[float | None, float | None] | None:
        """Return the factors of attn_out and mlp_out with which the block's equation holds here."""
        pre, post = self._ports.stream_through(calls[0])
        attn_out, mlp_out = (value_at(calls, replace(anchors[hook], scale=1.0)) for hook in ("attn_out", "mlp_out"))
        if pre is None or post is None or attn_out is None or mlp_out is None:
            return None
        if kind == "parallel":
            return self._matcher.factors(attn_out, mlp_out, post - pre)
        mid = value_at(calls, anchors["resid_mid"])
        if mid is None or self._matcher.same(mid, pre) or self._matcher.same(mid, post):
            return None
        return self._matcher.factor(attn_out, mid - pre), self._matcher.factor(mlp_out, post - mid)


def _moved(anchor: Anchor, block: str, other_block: str) -> Anchor | None:
    """Return the same place in another block; None for a sum with an earlier call, or outside the block."""
    if anchor.added_term is not None or not f"{anchor.module}.".startswith(f"{block}."):
        return None
    return replace(anchor, module=other_block + anchor.module.removeprefix(block))
