"""What transformers' attention is given and what it makes of it: queries, keys, scores and patterns of a pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from tests.support.measure import rel_err

OF_THEIR_OWN = ("BloomAttention", "FalconAttention", "GPTJAttention")
"""Classes that multiply queries and keys themselves; all others call a function that transformers looks up."""


@dataclass(frozen=True)
class Attended:
    """One call of attention, for one sequence.

    Attributes:
        q, k: as they are multiplied, [tokens, heads, d_head]; k has the key-value heads.
        scores: before softmax, [tokens, heads, keys]; -inf where a key is out of reach.
        pattern: after softmax; with a sink a row sums to less than 1.
        v: [tokens, key-value heads, d_v]; None where only the projection's output is known.
    """

    q: torch.Tensor
    k: torch.Tensor
    scores: torch.Tensor
    pattern: torch.Tensor
    v: torch.Tensor | None = None


Record = Callable[[torch.nn.Module, Attended], None]


@contextlib.contextmanager
def attention_watched(model: torch.nn.Module, record: Record, wanted: Callable[[], bool]) -> Any:
    """While this lasts, every call of attention in `model` is recorded when `wanted()`: not those of a vision tower."""
    from transformers.modeling_utils import AttentionInterface

    lookup = AttentionInterface.get_interface

    def get_interface(interface: Any, name: str, default: Any) -> Any:
        inner = lookup(interface, name, default)

        def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **more: Any) -> Any:
            result = inner(module, query, key, value, attention_mask, *args, **more)
            if not wanted():
                return result
            with torch._C.DisableTorchFunction(), torch.no_grad():
                record(module, _attended(module, query, key, value, attention_mask, result[0], *args, **more))
            return result

        return attend

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(AttentionInterface, "get_interface", get_interface))
        for module in model.modules():
            if type(module).__name__ in OF_THEIR_OWN:
                _watch_products(stack, module, record)
        yield


def _attended(
    module: Any, query: Any, key: Any, value: Any, mask: Any, output: torch.Tensor,
    scaling: float | None = None, softcap: float | None = None, **_: Any,
) -> Attended:  # fmt: skip
    """The scores and the pattern from their definition; they have to give what the model's own function gave."""
    q, k, v = query[0], key[0], value[0]
    group = len(q) // len(k)
    scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        mask = mask[0, :, :, : scores.shape[-1]].expand_as(scores)
        hidden = ~mask if mask.dtype == torch.bool else mask < torch.finfo(mask.dtype).min / 2
        scores = (scores if mask.dtype == torch.bool else scores + mask).masked_fill(hidden, -torch.inf)
    sinks = getattr(module, "sinks", None)
    if sinks is None:
        pattern = scores.softmax(-1)
    else:
        column = sinks.reshape(-1, 1, 1).expand(-1, scores.shape[1], 1)
        pattern = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    made = (pattern @ v.repeat_interleave(group, 0)).transpose(0, 1)
    error = rel_err(made, output.reshape(made.shape))
    if error > 1e-5:
        raise AssertionError(f"{type(module).__name__} is not softmax attention as defined: off by {error:.1e}")
    if scaling == 1.0:
        # OPT scales its queries itself; elsewhere the scale belongs to the scores.
        q = q / (getattr(module, "scaling", None) or 1.0)
    q, k = (_as_projected(module, x.transpose(0, 1)) for x in (q, k))
    return Attended(q, k, scores.transpose(0, 1), pattern.transpose(0, 1), v.transpose(0, 1).clone())


def _as_projected(module: Any, heads: torch.Tensor) -> torch.Tensor:
    """Heads in the order of columns that the projection has: DeepSeek's rotary puts even columns before odd ones."""
    config = module.config
    rotated = getattr(config, "qk_rope_head_dim", None)
    if not (rotated and getattr(config, "rope_interleave", False)):
        return heads.clone()
    halves = heads[..., -rotated:].unflatten(-1, (2, -1))
    return torch.cat([heads[..., :-rotated], halves.transpose(-1, -2).flatten(-2)], -1)


class _Products(TorchFunctionMode):
    """The first product of two batches of heads, and the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.q = self.k = self.scores = self.pattern = torch.empty(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.__name__
        if name in ("matmul", "__matmul__", "baddbmm") and not len(self.q):
            left, right = (kwargs["batch1"], kwargs["batch2"]) if name == "baddbmm" else args[:2]
            if left.ndim > 2 and right.ndim > 2:
                self.q, self.k = left.detach().clone(), right.detach().clone()
        elif name == "softmax":
            self.scores, self.pattern = args[0].detach().clone(), out.detach().clone()
        return out


def _watch_products(stack: contextlib.ExitStack, module: torch.nn.Module, record: Record) -> None:
    running: list[_Products] = []

    def enter(_module: Any, _args: Any) -> None:
        running.append(_Products())
        running[-1].__enter__()

    def leave(_module: Any, _args: Any, _output: Any) -> None:
        seen = running.pop()
        seen.__exit__(None, None, None)
        with torch._C.DisableTorchFunction():
            scores, pattern = seen.scores[0].transpose(0, 1), seen.pattern[0].transpose(0, 1)
            scores = scores.masked_fill(scores < torch.finfo(scores.dtype).min / 2, -torch.inf)
            q = seen.q.reshape(scores.shape[1], scores.shape[0], -1).transpose(0, 1)
            k = seen.k.reshape(-1, q.shape[-1], scores.shape[0]).permute(2, 0, 1)
            # Falcon repeats its keys for the queries of a group.
            k = k[:, :: k.shape[1] // getattr(module, "num_kv_heads", k.shape[1])]
            record(module, Attended(q, k, scores, pattern))

    stack.callback(module.register_forward_pre_hook(enter).remove)
    stack.callback(module.register_forward_hook(leave).remove)
