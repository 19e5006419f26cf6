"""The search for queries, keys and values of an attention layer: part of the search in `parts.attention`.

The layer is called with `q_rot`, `k_rot` and what is made of `v`. Each of `q`, `k` and `v` is looked
for among what the linear modules before it returned, most certain first:

1. Adjacent columns that the layer is given as they are.
2. Adjacent columns that a module before it (a norm, a rotary embedding) is given as they are.
3. Columns that the layer or such a module is given in one tensor, though they do not lie side by
   side. The point is that tensor.
4. The columns where vLLM's layout has them: queries, keys, values. `parts.verification` sees whether
   each head of what the layer is given is made of one head there.

Where a linear module leaves its bias to its caller, the point is where a module is given the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vllm_weir.worker.discovery.anchors import Anchor, ModuleCall, TensorKey
from vllm_weir.worker.discovery.parts.findings import BlockView, Columns, Linear, PartFindings
from vllm_weir.worker.discovery.parts.recorder import AttentionShape, Features

PROJECTED = ("q", "k", "v")
ROTATED = {"q": "q_rot", "k": "k_rot"}


@dataclass(frozen=True)
class _Source:
    """Where q, k or v may be.

    Attributes:
        linear: the module that returns its values.
        anchor: where they are; None if they are not rows there.
        columns: which columns of the module's result they are; None if they are scattered.
        located, exact: as in `PartFindings`.
    """

    linear: Linear
    anchor: Anchor | None
    columns: Columns | None
    located: bool
    exact: bool

    def overlaps(self, other: _Source) -> bool:
        """Return whether two have a column in common, as far as is known."""
        if self.columns is None or other.columns is None:
            return self.anchor == other.anchor
        return self.columns.overlaps(other.columns)


class Projections:
    """Places q_rot, k_rot, q, k and v of one attention layer."""

    def __init__(self, view: BlockView, layer: ModuleCall, shape: AttentionShape, found: PartFindings) -> None:
        self._view, self._layer, self._shape, self._found = view, layer, shape, found
        self._linears = [linear for linear in view.linears if linear.call.end < layer.start]
        self._given = {key.index: key for key in layer.args}
        self._sources: dict[str, _Source] = {}

    def place(self) -> list[Linear]:
        """Place the points; return the linear modules that return q, k and v."""
        for hook in PROJECTED:
            key = self._key(hook)
            if key is None:
                why = "attention of this block is called without it, and reads what another block keeps"
                self._found.refuse([name for name in (hook, ROTATED.get(hook)) if name], why)
            elif self._layer.args[key].shape[1] != self._width(hook):
                why = "attention is given it in a layout that is not [heads, d_head]"
                self._found.refuse([name for name in (hook, ROTATED.get(hook)) if name], why)
            elif hook in ROTATED:
                self._place_rotated(ROTATED[hook], key)
        # What is given as it is needs no guess, and is out of the way of those that do.
        wanted = [hook for hook in PROJECTED if hook not in self._found.refused]
        for hook in sorted(wanted, key=lambda hook: self._view.locate(self._value(hook), self._linears) is None):
            source = next(self._candidates(hook), None)
            if source is not None:
                self._sources[hook] = source
        for hook in wanted:
            self._place_projection(hook, self._sources.get(hook))
        return [self._sources[hook].linear for hook in PROJECTED if hook in self._sources]

    def _key(self, hook: str) -> TensorKey | None:
        return self._given.get(PROJECTED.index(hook))

    def _value(self, hook: str) -> torch.Tensor:
        key = self._key(hook)
        assert key is not None, "points without a value are refused"
        return self._layer.args[key]

    def _width(self, hook: str) -> int:
        return self._heads(hook) * self._size(hook)

    def _heads(self, hook: str) -> int:
        return self._shape.heads if hook == "q" else self._shape.kv_heads

    def _size(self, hook: str) -> int:
        return self._shape.value_size if hook == "v" else self._shape.head_size

    def _place_rotated(self, rotated: str, key: TensorKey) -> None:
        anchor = self._view.anchor_of(self._layer, key, "before")
        if anchor is None:
            self._found.refuse((rotated,), f"attention is given it as {list(self._layer.shapes[key])}")
        else:
            self._found.anchors[rotated] = anchor

    def _candidates(self, hook: str) -> Iterator[_Source]:
        """Yield where a point may be, most certain first, apart from those that are placed already."""
        for source in self._all_candidates(hook):
            fits = source.columns is None or source.columns.stop - source.columns.start == self._width(hook)
            if fits and not any(source.overlaps(other) for other in self._sources.values()):
                yield source

    def _all_candidates(self, hook: str) -> Iterator[_Source]:
        view, width, layer = self._view, self._width(hook), self._layer
        own_argument = [(layer, self._key(hook))]
        earlier = [(c, k) for c in view.calls if c.start < layer.start and c is not layer for k in c.args]
        given = [(c, k) for c, k in (*own_argument, *earlier) if k is not None and c.args[k].shape[1] == width]
        values = [(call.args[key], call is layer) for call, key in given]
        located = [(found, own) for value, own in values if (found := view.locate(value, self._linears)) is not None]
        layout = [self._width(part) for part in PROJECTED]
        slot = PROJECTED.index(hook)
        # Of what modules are given, keys and values look alike; where they lie tells them apart.
        for columns, exact in sorted(located, key=lambda found: not (found[1] or _in_slot(found[0], layout, slot))):
            yield _Source(columns.linear, view.place(columns), columns, True, exact)
        for call, key in given:
            value = call.args[key]
            # What lies side by side is a candidate above, by its columns, or belongs to another point.
            linear = view.gathered_from(value, self._linears) if view.locate(value, self._linears) is None else None
            if linear is not None:
                yield _Source(linear, view.anchor_of(call, key, "before"), None, True, call is layer)
        for linear in self._linears:
            for columns in _parts(linear, layout):
                yield _Source(linear, view.place(columns), columns, False, False)

    def _place_projection(self, hook: str, source: _Source | None) -> None:
        found, features = self._found, None
        if source is None:
            found.refuse((hook,), "no linear module before attention returns it in a way that could be recognised")
        elif source.anchor is None:
            found.refuse((hook,), "its projection returns it in a shape that is not one row for each token")
        else:
            found.anchors[hook] = source.anchor
            features = source.columns.features(self._view.parts.ranks) if source.columns is not None else None
            found.located |= {hook} if source.located else set()
            found.exact |= {hook} if source.exact else set()
        if features is None and self._view.parts.ranks == 1:
            features = Features.unsplit(self._width(hook))
        for name in (hook, ROTATED.get(hook)):
            if name not in found.anchors:
                continue
            if features is None:
                found.refuse((name,), "nothing tells which heads are this worker's")
            else:
                size = self._size(hook)
                found.features[name], found.shapes[name] = features, (features.whole // size, size)
        key = self._key(hook)
        reader = None if key is None else self._view.anchor_of(self._layer, key, "before")
        if hook in found.anchors and reader is not None:
            found.readers[hook] = (reader,)


def _in_slot(columns: Columns, layout: list[int], slot: int) -> bool:
    """Return whether columns lie where a layout of the whole result has this part."""
    begin = sum(layout[:slot])
    return columns.linear.value_out.shape[1] == sum(layout) and (columns.start, columns.stop) == (
        begin,
        begin + layout[slot],
    )


def _parts(linear: Linear, layout: list[int]) -> Iterator[Columns]:
    """Yield the parts of a linear module's result: its matrices, and queries, keys, values in a row."""
    width = linear.value_out.shape[1]
    for parts in ([part.width for part in linear.shape.outputs], layout):
        if sum(parts) == width:
            begin = 0
            for part in parts:
                yield Columns(linear, begin, begin + part)
                begin += part
