"""Anchors: places in a module tree where a tensor can be read and written as it passes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch


@dataclass(frozen=True, order=True)
class TensorKey:
    """Which of a call's tensors: an argument, by name and by place, or an element of what is returned.

    `name` is empty for arguments of a function that takes ``*args``; `index` is -1 for an argument that is only given
    by name, and for a call that returns one tensor.
    """

    kind: Literal["arg", "out"]
    index: int
    name: str = ""

    def __str__(self) -> str:
        if self.kind == "arg":
            return self.name or f"argument {self.index}"
        return "output" if self.index < 0 else f"output {self.index}"


@dataclass(frozen=True)
class AddedTerm:
    """What an earlier module of the same block returned: `scale` times it belongs to the point's value."""

    module: str
    hidden: TensorKey
    scale: float


@dataclass(frozen=True)
class Anchor:
    """Where a hook point is.

    Its value is ``scale * hidden``, and what stands beside it, of which there is one at most:

    Attributes:
        module: path from the model.
        when: whether the tensors are taken before or after the module's call.
        hidden: the tensor that is written to.
        residual: another of the call's, added: the sum is the stream. None in a call that goes without one.
        scale: of `hidden`.
        beside: another call's, added. A written point leaves zeros there, as in `residual`.
        offset: a vector [d] that the call returns too (a bias) and the model adds by itself: the value is
            ``scale * (hidden + offset)``, and only `hidden` is written.
    """

    module: str
    when: Literal["before", "after"]
    hidden: TensorKey
    residual: TensorKey | None = None
    scale: float = 1.0
    beside: AddedTerm | None = None
    offset: TensorKey | None = None

    def __str__(self) -> str:
        both = " + ".join(str(key) for key in (self.hidden, self.residual, self.offset) if key is not None)
        both = f"{_times(self.scale)}{both} of {self.module or 'the model'}, {self.when} the call"
        if self.beside is None:
            return both
        return f"{both}, + {_times(self.beside.scale)}{self.beside.hidden} of {self.beside.module}"

    @property
    def other_scale(self) -> float:
        """Factor of whatever stands beside `hidden`."""
        return self.scale if self.beside is None else self.beside.scale

    def tensors(
        self, args: Sequence, kwargs: Mapping, output: Any, kept: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`hidden` and what stands beside it in one call, as [tokens, width] views; `kept`: the tensor of `beside`."""
        hidden = _rows(pick(self.hidden, args, kwargs, output))
        if self.offset is not None:
            return hidden, pick(self.offset, args, kwargs, output).expand_as(hidden)
        other = kept if self.residual is None else pick(self.residual, args, kwargs, output)
        return hidden, None if other is None else _rows(other)

    def value(self, hidden: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
        """The point's value [tokens, width]."""
        own = hidden if self.scale == 1 else self.scale * hidden
        if other is None:
            return own
        return own + (other if self.other_scale == 1 else self.other_scale * other)

    def magnitude(self, hidden: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
        """The sum of the magnitudes of what makes up the value: its rounding is a part of this."""
        own = abs(self.scale) * hidden.abs()
        return own if other is None else own + abs(self.other_scale) * other.abs()


def pick(key: TensorKey, args: Sequence, kwargs: Mapping, output: Any) -> Any:
    """What `key` stands for in a call."""
    if key.kind == "out":
        if isinstance(output, (tuple, list)):
            return output[max(key.index, 0)] if key.index < len(output) else None
        return output if key.index <= 0 else None
    if key.name in kwargs:
        return kwargs[key.name]
    return args[key.index] if 0 <= key.index < len(args) else None


def arguments(parameters: Sequence[str], args: Sequence, kwargs: Mapping) -> dict[TensorKey, Any]:
    """A call's arguments by key; `parameters` as from `parameters_of`."""
    found = {TensorKey("arg", i, parameters[i] if i < len(parameters) else ""): value for i, value in enumerate(args)}
    for name, value in kwargs.items():
        found[TensorKey("arg", parameters.index(name) if name in parameters else -1, name)] = value
    return found


def outputs(output: Any) -> dict[TensorKey, Any]:
    """What a call returned, by key."""
    if isinstance(output, (tuple, list)):
        return {TensorKey("out", i): value for i, value in enumerate(output)}
    return {TensorKey("out", -1): output}


def parameters_of(module: torch.nn.Module) -> list[str]:
    """Names of the positional parameters of a module's forward, up to the first ``*args``."""
    names = []
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            break
        names.append(parameter.name)
    return names


def _times(scale: float) -> str:
    return "" if scale == 1 else f"{scale:.6g} x "


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    # The Transformers backend carries a batch dimension of one.
    return tensor.squeeze(0) if tensor.dim() == 3 else tensor
