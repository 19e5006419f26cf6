"""The hook points inside attention and MLP of a transformers model: found by structure, read and changed by hooks.

A tap is a module's input or output and the columns of its last dimension that are a point's row: projections of
queries, keys and values that are packed into one matrix are told apart by what attention is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.conformance.attention import Attended, attention_watched
from tests.conformance.parts import ATTENTION, INNER, MLP, ROUTING, STEERABLE, Block, Tap, find_attention, find_mlp

__all__ = ["ATTENTION", "INNER", "MLP", "ROUTING", "STEERABLE", "Edit", "Inside", "Rows"]

Rows = dict[tuple[str, int], torch.Tensor]
Edit = Callable[[str, int, torch.Tensor], torch.Tensor]
"""(hook, layer, rows [tokens, ...]) -> the rows that take their place."""


class Inside:
    """The points inside the blocks of a model.

    Attributes:
        blocks: what each block has.
    """

    def __init__(self, model: torch.nn.Module, blocks: Sequence[torch.nn.Module], width: int) -> None:
        self._model, self._modules, self._width = model, blocks, width
        self._layer = -1
        self.blocks = [Block() for _ in blocks]
        self._find()

    def missing(self, hook: str, layer: int) -> str | None:
        """Why there is no such point; None if there is."""
        return self.blocks[layer].missing.get(hook)

    @contextlib.contextmanager
    def watched(self, rows: Rows, edit: Edit | None = None) -> Iterator[None]:
        """While this lasts, a pass over one sequence puts the rows of every point into `rows`, after `edit`."""

        def take(hook: str, layer: int, value: torch.Tensor) -> torch.Tensor:
            if (hook, layer) in rows:
                raise AssertionError(f"{hook}[{layer}] was computed twice in one pass")
            value = edit(hook, layer, value) if edit is not None else value
            rows[hook, layer] = value.detach().clone()
            return value

        def attended(_module: torch.nn.Module, seen: Attended) -> None:
            if self._layer >= 0 and self.blocks[self._layer].attends:
                for hook, value in zip(("q_rot", "k_rot", "attn_scores", "pattern"), seen_rows(seen)):
                    rows[hook, self._layer] = value

        with contextlib.ExitStack() as stack:
            self._follow_layers(stack)
            stack.enter_context(attention_watched(self._model, attended, lambda: self._layer >= 0))
            self._hook_taps(stack, take)
            self._hook_experts(stack, rows)
            weights = {id(b.router): layer for layer, b in enumerate(self.blocks) if b.router is not None}
            if weights:
                stack.enter_context(_Routers(weights, take))
            yield
            for layer, block in enumerate(self.blocks):
                if ("router_logits", layer) in rows and ("expert_ids", layer) not in rows and block.top_k:
                    best = rows["router_logits", layer].topk(block.top_k)
                    rows["expert_ids", layer], rows["expert_weights", layer] = best.indices, best.values.sigmoid()

    def _follow_layers(self, stack: contextlib.ExitStack) -> None:
        for layer, block in enumerate(self._modules):

            def enter(*_: Any, layer: int = layer) -> None:
                self._layer = layer

            def leave(*_: Any) -> None:
                self._layer = -1

            stack.callback(block.register_forward_pre_hook(enter).remove)
            stack.callback(block.register_forward_hook(leave).remove)

    def _hook_taps(self, stack: contextlib.ExitStack, take: Edit) -> None:
        """One hook a module and side: a module that several blocks share has taps in each."""
        by_place: dict[tuple[int, str], dict[int, list[Tap]]] = {}
        modules: dict[int, torch.nn.Module] = {}
        for layer, block in enumerate(self.blocks):
            for tap in block.taps:
                modules[id(tap.module)] = tap.module
                by_place.setdefault((id(tap.module), tap.side), {}).setdefault(layer, []).append(tap)

        for (key, side), taps in by_place.items():

            def changed(tensor: torch.Tensor, taps: Any = taps) -> torch.Tensor:
                with torch._C.DisableTorchFunction():
                    for tap in taps.get(self._layer, ()):
                        tensor = _through(tap, tensor, lambda rows, hook=tap.hook: take(hook, self._layer, rows))
                    return tensor

            def before(_m: Any, args: Any, kwargs: Any, changed: Any = changed) -> Any:
                if args:
                    return (changed(args[0]), *args[1:]), kwargs
                name = next(iter(name for name in ("hidden_states", "x") if name in kwargs))
                return args, {**kwargs, name: changed(kwargs[name])}

            def after(_m: Any, _args: Any, output: Any, changed: Any = changed) -> Any:
                return changed(output)

            if side == "in":
                stack.callback(modules[key].register_forward_pre_hook(before, with_kwargs=True).remove)
            else:
                stack.callback(modules[key].register_forward_hook(after).remove)

    def _hook_experts(self, stack: contextlib.ExitStack, rows: Rows) -> None:
        def given(_m: Any, args: Any, kwargs: Any) -> None:
            named = [
                kwargs[n] for n in ("top_k_index", "router_indices", "top_k_weights", "routing_weights") if n in kwargs
            ]
            values = [*args[1:], *named]
            if len(values) >= 2:
                rows["expert_ids", self._layer] = values[0].detach().clone()
                rows["expert_weights", self._layer] = values[1].detach().clone()

        for module in {id(b.experts): b.experts for b in self.blocks if b.experts is not None}.values():
            stack.callback(module.register_forward_pre_hook(given, with_kwargs=True).remove)

    @torch.no_grad()
    def _find(self) -> None:
        """Run a few tokens through the model to see which modules attend, and what they are given."""
        seen: dict[int, tuple[torch.nn.Module, Attended]] = {}
        outputs: dict[int, torch.Tensor] = {}

        def record(module: torch.nn.Module, attended: Attended) -> None:
            if self._layer >= 0:
                seen[self._layer] = (module, attended)

        def keep(module: torch.nn.Module, _args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                outputs[id(module)] = output.detach().flatten(0, -2).clone()

        with contextlib.ExitStack() as stack:
            self._follow_layers(stack)
            stack.enter_context(attention_watched(self._model, record, lambda: self._layer >= 0))
            for module in self._model.modules():
                stack.callback(module.register_forward_hook(keep).remove)
            self._model(input_ids=torch.tensor([[5, 9, 7, 11, 6]], device=self._model.device), use_cache=False)
        for layer, block in enumerate(self._modules):
            found = self.blocks[layer]
            if layer in seen:
                find_attention(found, *seen[layer], outputs, self._width)
            attention = seen[layer][0] if layer in seen else None
            find_mlp(found, block, attention, outputs, self._width)
            present = {tap.hook for tap in found.taps}
            if found.attends:
                present |= {"q_rot", "k_rot", "attn_scores", "pattern"}
            if found.router is not None:
                present |= set(ROUTING)
            for hook in INNER:
                if hook not in present:
                    found.missing.setdefault(hook, f"transformers' block has no {hook}")


def seen_rows(seen: Attended) -> tuple[torch.Tensor, ...]:
    """The rows of q_rot, k_rot, attn_scores and pattern."""
    return seen.q, seen.k, seen.scores, seen.pattern


def _through(tap: Tap, tensor: torch.Tensor, take: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The tensor with the tap's rows replaced by what `take` makes of them."""
    flat = tensor.reshape(-1, tensor.shape[-1])
    rows = flat[:, tap.columns]
    now = take(rows)
    if now is rows:
        return tensor
    flat = flat.clone()
    flat[:, tap.columns.flatten()] = now.flatten(1).to(flat.dtype)
    return flat.view(tensor.shape)


class _Routers(TorchFunctionMode):
    """Takes the product with a router's weight, wherever it is made."""

    def __init__(self, weights: dict[int, int], take: Edit) -> None:
        super().__init__()
        self.weights, self.take = weights, take

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.__name__ == "linear" and id(args[1]) in self.weights:
            with torch._C.DisableTorchFunction():
                rows = self.take("router_logits", self.weights[id(args[1])], out.reshape(-1, out.shape[-1]))
                return rows.view(out.shape)
        return out
