"""vllm-lens's functions, as hooks of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_weir.compat.vllm_lens.request import saved_name
from vllm_weir.worker.own_function import HookContext


class LensContext:
    """vllm-lens's `HookContext`: one for each hook and sequence.

    Attributes:
        layer_idx: the block.
        seq_len: rows of this call: those of the sequence in this step.
        saved: comes back as ``out.hook_results["INDEX"]``.
    """

    def __init__(self) -> None:
        self.layer_idx = self.seq_len = 0
        self.saved: dict[Any, Any] = {}
        self._context: Any = None

    def get_parameter(self, name: str) -> torch.Tensor:
        weight: torch.Tensor = self._context.parameter(name)
        return weight

    @property
    def model(self) -> Any:
        """Raises AttributeError: functions get no model."""
        raise AttributeError("ctx.model is not given; ctx.get_parameter(name) is a weight of the model")


class LensFunction:
    """A function of one request."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._context = function, LensContext()

    def __call__(self, rows: torch.Tensor, ctx: HookContext) -> Any:
        context = self._context
        context.layer_idx, context.seq_len, context._context = ctx.layer, len(rows), ctx
        returned = self._function(context, rows)
        own = {saved_name(ctx.args["key"], ctx.args["index"], name): one for name, one in context.saved.items()}
        for name in ctx.saved.keys() - own.keys():
            del ctx.saved[name]
        ctx.saved.update(own)
        return returned.expand_as(rows) if isinstance(returned, torch.Tensor) else returned
