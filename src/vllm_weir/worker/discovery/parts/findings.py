"""What was found inside the attention or the MLP of one block, and how it is read off a block's record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch

from vllm_weir.schema.rows import RowShape
from vllm_weir.worker.discovery.anchors import Anchor, ModuleCall, TensorKey, value_at
from vllm_weir.worker.discovery.matcher import Matcher
from vllm_weir.worker.discovery.module_tree import ModuleTree
from vllm_weir.worker.discovery.parts.recorder import BlockRecord, Features, LinearShape, PartModules


@dataclass
class PartFindings:
    """The points inside one part of a block."""

    anchors: dict[str, Anchor] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    # hook point -> shape of a row of the whole model, unless it is (d_model,)
    shapes: dict[str, RowShape] = field(default_factory=dict)
    # hook point -> which values of the whole row this worker holds, if its rows are not as wide as the stream
    features: dict[str, Features] = field(default_factory=dict)
    # hook point -> the tensors that must move by what is added there, and by nothing else
    readers: dict[str, tuple[Anchor, ...]] = field(default_factory=dict)
    quantised: set[str] = field(default_factory=set)  # hook points whose values a module quantises
    # those of q, k and v whose heads are known to keep their order, because attention or a module before it is given
    # them as they are
    located: set[str] = field(default_factory=set)
    exact: set[str] = field(default_factory=set)  # those that attention itself is given as they are
    # the first head of what attention returned, if z is made of that by a gate or a norm; None if z is what attention
    # returned
    source_of_z: Anchor | None = None
    router_inside: str = ""  # path of the layer of experts that calls its router itself; "" if none

    def refuse(self, hooks: Iterable[str], why: str) -> None:
        """Refuse hook points; the first reason that is given stays."""
        for hook in hooks:
            self.anchors.pop(hook, None)
            self.refused.setdefault(hook, why)

    def shares_features(self, hook: str, other: str) -> bool:
        """Return whether it is known from `hook` which part of a row of `other` is here."""
        features = self.features.get(other)
        return features is not None and features.width != features.whole and features == self.features.get(hook)


@dataclass(frozen=True)
class Linear:
    """A call of a linear module.

    Attributes:
        given, returned: keys of its input and its result.
    """

    call: ModuleCall
    shape: LinearShape
    given: TensorKey
    returned: TensorKey

    @property
    def value_in(self) -> torch.Tensor:
        return self.call.args[self.given]

    @cached_property
    def value_out(self) -> torch.Tensor:
        """Its result, [tokens, width], with the bias that it leaves to its caller to add."""
        out = self.call.outputs[self.returned]
        return out + self.bias if self.bias is not None else out

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias that it returns beside its result."""
        width = self.call.outputs[self.returned].shape[1]
        return next((offset for offset in self.call.offsets.values() if len(offset) == width), None)


@dataclass(frozen=True)
class Columns:
    """Adjacent columns of what a linear module returned."""

    linear: Linear
    start: int
    stop: int

    @property
    def value(self) -> torch.Tensor:
        return self.linear.value_out[:, self.start : self.stop]

    def overlaps(self, other: Columns) -> bool:
        return self.linear.call is other.linear.call and self.start < other.stop and other.start < self.stop

    def features(self, ranks: int) -> Features | None:
        """Return which values of the whole model these are; None if nothing tells."""
        begin = 0
        for part in self.linear.shape.outputs:
            if begin <= self.start and self.stop <= begin + part.width:
                if self.stop - self.start == part.width:
                    return part
                break
            begin += part.width
        # The model itself takes its worker's columns out of a matrix that is not divided.
        return Features.unsplit(self.stop - self.start) if ranks == 1 else None


class BlockView:
    """A block's record, and what is known of its modules.

    Attributes:
        linears: the calls of linear modules, by start.
    """

    def __init__(self, record: BlockRecord, tree: ModuleTree, parts: PartModules, matcher: Matcher) -> None:
        self.record, self.tree, self.parts, self.matcher = record, tree, parts, matcher
        self.linears = [linear for call in record.calls[1:] if (linear := self._linear(call)) is not None]

    def _linear(self, call: ModuleCall) -> Linear | None:
        shape = self.parts.linear(self.tree.modules[call.path])
        if shape is None or not call.outputs:
            return None
        given = next((key for key in sorted(call.args, key=lambda k: k.index) if key in call.args), None)
        return None if given is None else Linear(call, shape, given, min(call.outputs))

    @property
    def calls(self) -> list[ModuleCall]:
        return self.record.calls[1:]

    def anchor_of(self, call: ModuleCall, key: TensorKey, when: Literal["before", "after"]) -> Anchor | None:
        """Return the anchor of a whole tensor of a call; None if it is not one row for each token.

        It is [tokens, width] (with a batch of one in the Transformers backend), or [tokens, heads,
        d_head].
        """
        tokens, shape = self.record.tokens, call.shapes[key]
        if shape[:-1] in ((tokens,), (1, tokens)):
            return Anchor(call.path, when, key)
        if len(shape) == 3 and shape[0] == tokens:
            return Anchor(call.path, when, key, per_head=True)
        return None

    def place(self, columns: Columns) -> Anchor | None:
        """Return where these columns are a tensor: as they are returned, or where they are given to a module.

        The latter if the linear module leaves its bias to its caller.
        """
        linear = columns.linear
        if linear.bias is None:
            anchor = self.anchor_of(linear.call, linear.returned, "after")
            if anchor is not None and (columns.start, columns.stop) != (0, linear.value_out.shape[1]):
                return None if anchor.per_head else replace(anchor, columns=(columns.start, columns.stop))
            return anchor
        for call in self.calls:
            for key, value in call.args.items() if call.start > linear.call.end else ():
                if value.shape == columns.value.shape and self.equal(value, columns.value):
                    return self.anchor_of(call, key, "before")
        return None

    def equal(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Return whether two tensors are equal, but for the rounding of one addition."""
        return torch.equal(a, b) or torch.allclose(a, b, rtol=2 * self.matcher.eps, atol=1e-6)

    def locate(self, value: torch.Tensor, linears: Iterable[Linear]) -> Columns | None:
        """Return the adjacent columns of a linear module's result that equal `value`."""
        width = value.shape[1]
        for linear in linears:
            out = linear.value_out
            if out.shape[1] < width:
                continue
            firsts, first = out[:, : out.shape[1] - width + 1], value[:, :1]
            near = torch.isclose(firsts, first, rtol=2 * self.matcher.eps, atol=1e-6)
            for begin in near.all(0).nonzero()[:, 0].tolist():
                columns = Columns(linear, begin, begin + width)
                same = self.equal if linear.bias is not None else torch.equal
                if same(columns.value, value):
                    return columns
        return None

    def gathered_from(self, value: torch.Tensor, linears: Iterable[Linear]) -> Linear | None:
        """Return the linear module among whose columns is every column of `value`, in any order."""
        wanted = {tuple(column) for column in value.T.tolist()}
        for linear in linears:
            if linear.value_out.shape[1] >= value.shape[1] and wanted <= set(map(tuple, linear.value_out.T.tolist())):
                return linear
        return None

    def projection_to(self, anchor: Anchor | None, linears: Iterable[Linear]) -> Linear | None:
        """Return the linear module whose result is what a part adds to the stream, or is made into that.

        It is a multiple of a term of the value, or what the module that returns the value was given.
        """
        if anchor is None:
            return None
        ends = [(anchor.module, anchor.hidden)]
        if anchor.added_term is not None:
            ends.append((anchor.added_term.module, anchor.added_term.hidden))
        values: list[torch.Tensor] = []
        for path, key in ends:
            call = next((call for call in self.record.calls if call.path == path), None)
            if call is not None:
                first = call.args if anchor.when == "before" else call.visible_after
                values += [first[key]] if key in first else []
                values += call.args.values()
        # The last one comes first: a module between the two may hand an earlier result through.
        for linear in sorted(linears, key=lambda linear: -linear.call.start):
            results = [linear.call.outputs[linear.returned], *([] if linear.bias is None else [linear.value_out])]
            if any(self.matcher.factor(r, value) is not None for r in results for value in values):
                return linear
        return None


def row_at(record: BlockRecord, anchor: Anchor) -> torch.Tensor | None:
    """Return an anchor's value in a block's record, [tokens, width]; None if it was not recorded."""
    value = value_at(record.calls, anchor)
    if value is None or anchor.columns is None:
        return value
    return value[:, slice(*anchor.columns)]
