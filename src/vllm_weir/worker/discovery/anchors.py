"""Where a hook point is among the tensors of calls, and the record of the calls of a forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch


@dataclass(frozen=True, order=True)
class TensorKey:
    """Which tensor of a call: an argument, by name and position, or an element of the output."""

    kind: Literal["arg", "out"]  # "arg" or "out"
    # position of the argument or output element; -1 for an argument that is only given by name, and for a call that
    # returns a single tensor
    index: int
    name: str = ""  # of the argument; empty if it is one of ``*args``

    def __str__(self) -> str:
        if self.kind == "arg":
            return self.name or f"argument {self.index}"
        return "output" if self.index < 0 else f"output {self.index}"


@dataclass(frozen=True)
class AddedTerm:
    """A term ``scale * hidden`` of a point's value that an earlier module of the block returned."""

    module: str
    hidden: TensorKey
    scale: float


@dataclass(frozen=True)
class Anchor:
    """Where a hook point is, and how its value is made.

    At most one of `residual`, `added_term` and `offset` is set.
    """

    module: str  # path from the model
    when: Literal["before", "after"]  # whether the tensors are taken before or after the module's call
    hidden: TensorKey  # the tensor that is written
    residual: TensorKey | None = None  # another tensor of the same call, or None. A single call may leave it out.
    scale: float = 1.0  # factor of `hidden`, and of `residual` and `offset`
    added_term: AddedTerm | None = None  # a term from an earlier call, with a factor of its own
    # a vector [d] in the call's output that the model adds later (a bias): ``value = scale * (hidden + offset)``. It is
    # read and never written.
    offset: TensorKey | None = None
    # (start, stop): the slice of the last dimension of `hidden` that is the point's row; None for all of it. Such an
    # anchor has no other tensor, and a scale of 1.
    columns: tuple[int, int] | None = None
    # whether `hidden` is [tokens, heads, d_head], so that its rows are its last two dimensions. Such an anchor too has
    # no other tensor.
    per_head: bool = False

    def __str__(self) -> str:
        keys = " + ".join(str(key) for key in (self.hidden, self.residual, self.offset) if key is not None)
        text = f"{_factor_prefix(self.scale)}{keys} of {self.module or 'the model'}, {self.when} the call"
        if self.added_term is None:
            return text
        term = self.added_term
        return f"{text}, + {_factor_prefix(term.scale)}{term.hidden} of {term.module}"

    @property
    def other_scale(self) -> float:
        return self.scale if self.added_term is None else self.added_term.scale

    @property
    def modules(self) -> list[str]:
        return [self.module] if self.added_term is None else [self.module, self.added_term.module]

    def tensors(
        self, args: Sequence, kwargs: Mapping, output: Any, added: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return views of `hidden` and `other` in one call, [tokens, width] each; `added` is from the earlier call."""
        hidden = pick(self.hidden, args, kwargs, output)
        if self.per_head:
            return hidden.flatten(1), None
        hidden = _as_rows(hidden)
        if self.offset is not None:
            return hidden, pick(self.offset, args, kwargs, output).expand_as(hidden)
        other = added if self.residual is None else pick(self.residual, args, kwargs, output)
        return hidden, None if other is None else _as_rows(other)

    def value(self, hidden: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
        scaled = hidden if self.scale == 1 else self.scale * hidden
        if other is None:
            return scaled
        return scaled + (other if self.other_scale == 1 else self.other_scale * other)

    def magnitude(self, hidden: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
        """Return the sum of the terms' absolute values; rounding errors are relative to it."""
        scaled = abs(self.scale) * hidden.abs()
        return scaled if other is None else scaled + abs(self.other_scale) * other.abs()


def pick(key: TensorKey, args: Sequence, kwargs: Mapping, output: Any) -> Any:
    """Return what `key` stands for in a call; None if the call has no such argument or output."""
    if key.kind == "out":
        if isinstance(output, (tuple, list)):
            return output[max(key.index, 0)] if key.index < len(output) else None
        return output if key.index <= 0 else None
    if key.name in kwargs:
        return kwargs[key.name]
    return args[key.index] if 0 <= key.index < len(args) else None


def arguments(parameters: Sequence[str], args: Sequence, kwargs: Mapping) -> dict[TensorKey, Any]:
    found = {TensorKey("arg", i, parameters[i] if i < len(parameters) else ""): value for i, value in enumerate(args)}
    for name, value in kwargs.items():
        found[TensorKey("arg", parameters.index(name) if name in parameters else -1, name)] = value
    return found


def outputs(output: Any) -> dict[TensorKey, Any]:
    if isinstance(output, (tuple, list)):
        return {TensorKey("out", i): value for i, value in enumerate(output)}
    return {TensorKey("out", -1): output}


def parameters_of(module: torch.nn.Module) -> list[str]:
    """Return the names of the positional parameters of a forward, up to the first ``*args``."""
    names = []
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            break
        names.append(parameter.name)
    return names


def _factor_prefix(scale: float) -> str:
    return "" if scale == 1 else f"{scale:.6g} x "


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    # The Transformers backend carries a batch dimension of one.
    return tensor.squeeze(0) if tensor.dim() == 3 else tensor


# A recorded forward pass: which tensors passed which module, in what order.
#
# `Recorder` fills a `Trace` with one `ModuleCall` per call of a module. `value_at` evaluates an
# anchor on recorded calls. All recorded tensors are float32 copies, [tokens, width].


@dataclass
class ModuleCall:
    """One call of a module."""

    path: str  # of the module, from the model
    local_path: str  # of the module, from its block; "" for the block itself
    start: int  # time of the call. Times count the starts and ends of calls in a pass.
    occurrence: int = 0  # number of earlier calls of this module in the pass
    end: int = 0  # time of the return
    # arguments of the stream's width, as the call was given them
    args: dict[TensorKey, torch.Tensor] = field(default_factory=dict)
    outputs: dict[TensorKey, torch.Tensor] = field(default_factory=dict)  # outputs of the stream's width
    # the arguments that the call wrote into, or is known to write into, after the call
    args_after: dict[TensorKey, torch.Tensor] = field(default_factory=dict)
    # vectors [d] among the outputs, float32: biases that the caller is to add
    offsets: dict[TensorKey, torch.Tensor] = field(default_factory=dict)
    # arguments and outputs of other widths; only of calls outside the blocks
    other_widths: dict[TensorKey, torch.Tensor] = field(default_factory=dict)
    # of every floating-point argument and output of two or more dimensions
    shapes: dict[TensorKey, tuple[int, ...]] = field(default_factory=dict)
    pointers: dict[TensorKey, int] = field(default_factory=dict)  # addresses of the tensors in `args` and `outputs`

    @property
    def results(self) -> dict[TensorKey, torch.Tensor]:
        return {**self.outputs, **self.args_after}

    @property
    def visible_after(self) -> dict[TensorKey, torch.Tensor]:
        """All tensors that the caller holds after the call: its arguments, and the outputs."""
        return {**self.args, **self.results}

    @property
    def result_keys(self) -> list[TensorKey]:
        """Keys of the results; an argument that is returned too counts as an output only."""
        returned = {self.pointers[key] for key in self.outputs}
        written = (key for key in sorted(self.args_after) if self.pointers[key] not in returned)
        return [*sorted(self.outputs), *written]


@dataclass
class Trace:
    """The calls of one forward pass."""

    # for each block, its own call and then those of the modules that ran in it, by start
    blocks: list[list[ModuleCall]]
    outside: list[ModuleCall]  # calls of modules that ran in no block and contain no block, by start
    model_output: torch.Tensor | None = None  # the first tensor that the model returned, float32 [tokens, any width]


def terms_at(calls: Sequence[ModuleCall], anchor: Anchor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return an anchor's `hidden` and `other` in recorded calls; None if they were not recorded."""
    call = next((c for c in calls if c.path == anchor.module), None)
    if call is None:
        return None
    tensors = call.visible_after if anchor.when == "after" else call.args
    hidden = tensors.get(anchor.hidden)
    if hidden is None:
        return None
    if anchor.added_term is not None:
        term = anchor.added_term
        added = next((c.outputs[term.hidden] for c in calls if c.path == term.module), None)
        return None if added is None else (hidden, added)
    if anchor.offset is not None:
        return hidden, call.offsets[anchor.offset]
    return hidden, None if anchor.residual is None else tensors.get(anchor.residual)


def value_at(calls: Sequence[ModuleCall], anchor: Anchor) -> torch.Tensor | None:
    """Return an anchor's value in recorded calls, [tokens, d]; None if it was not recorded."""
    terms = terms_at(calls, anchor)
    return None if terms is None else anchor.value(*terms)
