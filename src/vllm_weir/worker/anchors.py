"""Anchors: places in a module tree where a tensor can be read and written as it passes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch


@dataclass(frozen=True, order=True)
class Key:
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
class Anchor:
    """Where a hook point is.

    Attributes:
        module: path from the model.
        when: whether the tensors are taken before or after the module's call.
        hidden, residual: the tensors, whose sum the point's value is; `residual` may be None.
        scale: the point's value is this times `hidden`.
    """

    module: str
    when: Literal["before", "after"]
    hidden: Key
    residual: Key | None = None
    scale: float = 1.0

    def __str__(self) -> str:
        both = f"{self.hidden} + {self.residual}" if self.residual else f"{self.hidden}"
        times = "" if self.scale == 1 else f"{self.scale:.6g} x "
        return f"{times}{both} of {self.module}, {self.when} the call"

    def tensors(self, args: Sequence, kwargs: Mapping, output: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The tensors of one call, as [tokens, width] views."""
        hidden = pick(self.hidden, args, kwargs, output)
        residual = None if self.residual is None else pick(self.residual, args, kwargs, output)
        return _rows(hidden), None if residual is None else _rows(residual)


def pick(key: Key, args: Sequence, kwargs: Mapping, output: Any) -> Any:
    """What `key` stands for in a call."""
    if key.kind == "out":
        if isinstance(output, (tuple, list)):
            return output[max(key.index, 0)] if key.index < len(output) else None
        return output if key.index <= 0 else None
    if key.name in kwargs:
        return kwargs[key.name]
    return args[key.index] if 0 <= key.index < len(args) else None


def arguments(parameters: Sequence[str], args: Sequence, kwargs: Mapping) -> dict[Key, Any]:
    """A call's arguments by key; `parameters` as from `parameters_of`."""
    found = {Key("arg", i, parameters[i] if i < len(parameters) else ""): value for i, value in enumerate(args)}
    for name, value in kwargs.items():
        found[Key("arg", parameters.index(name) if name in parameters else -1, name)] = value
    return found


def outputs(output: Any) -> dict[Key, Any]:
    """What a call returned, by key."""
    if isinstance(output, (tuple, list)):
        return {Key("out", i): value for i, value in enumerate(output)}
    return {Key("out", -1): output}


def parameters_of(module: torch.nn.Module) -> list[str]:
    """Names of the positional parameters of a module's forward, up to the first ``*args``."""
    names = []
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            break
        names.append(parameter.name)
    return names


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    # The Transformers backend carries a batch dimension of one.
    return tensor.squeeze(0) if tensor.dim() == 3 else tensor
