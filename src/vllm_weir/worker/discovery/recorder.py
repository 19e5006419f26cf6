"""The recorder of probe passes: it records, and can overwrite, the tensors of every call.

Hooks around every module of a `ModuleTree` do the following in each call:

1. Before a block's call, `enter` may overwrite the block's arguments.
2. Before any call, vectors are added at the anchors of `writes` that lie there; then the arguments
   are recorded.
3. After a call, `leave` may overwrite what the module itself produced.
4. After the call, vectors are added at the anchors of `writes` that lie there; then the outputs,
   and the arguments that the module changed in place, are recorded.

So the `Trace` holds what the rest of the model computes with. The overwriting functions used are in
`noise`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vllm_weir.worker.discovery.anchors import (
    Anchor,
    ModuleCall,
    TensorKey,
    Trace,
    arguments,
    outputs,
    parameters_of,
    pick,
)
from vllm_weir.worker.discovery.module_tree import ModuleTree

EMBEDDINGS_PARAMETER = "inputs_embeds"
"""Parameter that takes embeddings, if the runner looks tokens up before it calls the model."""
RESULT_PARAMETER = "output"
"""Parameter that vLLM's token mixers write their result into, if they return none."""

Overwrite = Callable[[int, ModuleCall, Mapping[TensorKey, torch.Tensor]], None]
"""(block, call, live tensors by key) -> None; writes into the tensors before they are recorded."""


@dataclass(frozen=True)
class _WatchedModule:
    """A module whose calls are recorded; `block` is OUTSIDE if it belongs to none."""

    module: torch.nn.Module
    block: int
    path: str
    local_path: str
    parameters: list[str]

    @property
    def is_block(self) -> bool:
        return self.local_path == ""


class Recorder:
    """Records one forward pass.

    Args:
        enter: overwrites a block's arguments.
        leave: overwrites what a module produced.
        writes: vectors to add at anchors, float32 [tokens, d] each.
        offset_noise: (name, vector) -> replacement for a vector [d] among a module's outputs.
    """

    def __init__(
        self,
        tree: ModuleTree,
        enter: Overwrite | None = None,
        leave: Overwrite | None = None,
        writes: Mapping[Anchor, torch.Tensor] | None = None,
        offset_noise: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._tree, self._enter, self._leave, self._offset_noise = tree, enter, leave, offset_noise
        self._writes = dict(writes or {})
        self._added_keys = {a.added_term.module: a.added_term.hidden for a in self._writes if a.added_term is not None}
        self._added: dict[str, tuple[torch.Tensor, ModuleCall]] = {}
        """Module of an added term -> its live tensor, and the call that returned it."""
        self._clock = 0
        self._num_calls: Counter[str] = Counter()
        self._open_calls: dict[int, list[ModuleCall]] = {}
        """Id of a module -> its calls that have not returned."""
        self._running_blocks: list[int] = []
        self._handles: list[Any] = []
        self.trace = Trace([[] for _ in range(tree.num_layers)], [])

    @contextmanager
    def recording(self) -> Iterator[Trace]:
        """Record the pass that runs inside the context; the hooks are removed at its end."""
        try:
            for block, path, local_path, module in self._tree.members():
                self._watch(_WatchedModule(module, block, path, local_path, parameters_of(module)))
            with self._watching_model():
                yield self.trace
        finally:
            for handle in self._handles:
                handle.remove()

    def _watch(self, watched: _WatchedModule) -> None:
        def before(_module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            self._begin_call(watched, args, kwargs)

        def after(_module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
            return self._end_call(watched, args, kwargs, output)

        self._handles.append(watched.module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(watched.module.register_forward_hook(after, with_kwargs=True))

    def _begin_call(self, watched: _WatchedModule, args: tuple, kwargs: dict) -> None:
        given = arguments(watched.parameters, args, kwargs)
        live = self._of_stream_width(given)
        call = self._new_call(watched.path, watched.local_path)
        call.shapes = _shapes(given)
        if watched.is_block and self._enter is not None:
            self._enter(watched.block, call, live)
        self._write(watched.path, "before", args, kwargs, None)
        call.pointers = _pointers(live)
        call.args = _copies(live)
        if watched.is_block:
            self._running_blocks.append(watched.block)
        # Several blocks may share a module: its call belongs to the block that is running.
        if self._running_blocks:
            self.trace.blocks[self._running_blocks[-1]].append(call)
        else:
            call.other_widths = self._of_other_widths(given)
            self.trace.outside.append(call)
        self._open_calls.setdefault(id(watched.module), []).append(call)

    def _end_call(self, watched: _WatchedModule, args: tuple, kwargs: dict, output: Any) -> Any:
        """Record the end of a call; return the output to hand to the caller."""
        call = self._open_calls[id(watched.module)].pop()
        output = self._replace_offsets(call, output)
        returned = outputs(output)
        live = self._of_stream_width(returned)
        changed = self._changed_args(call, arguments(watched.parameters, args, kwargs), returned)
        call.shapes |= _shapes(returned)
        if self._leave is not None:
            self._leave(watched.block, call, self._produced(watched.module, call, returned, changed))
        self._write(watched.path, "after", args, kwargs, output)
        call.args_after = _copies(changed)
        call.outputs = _copies(live)
        call.pointers |= _pointers(live)
        if watched.path in self._added_keys:
            self._added[watched.path] = pick(self._added_keys[watched.path], args, kwargs, output), call
        call.end = self._tick()
        if watched.is_block:
            self._running_blocks.pop()
        if not self._running_blocks:
            call.other_widths |= self._of_other_widths(returned)
        return output

    def _changed_args(
        self, call: ModuleCall, given: Mapping[TensorKey, Any], returned: Mapping[TensorKey, Any]
    ) -> dict[TensorKey, torch.Tensor]:
        """Return the arguments that a call wrote into, or is known to write into."""
        live = self._of_stream_width(given)
        changed = {k: v for k, v in live.items() if k in call.args and not _equal(call.args[k], v)}
        if not changed and not any(_is_activation(v) for v in returned.values()):
            # Without a KV cache a mixer may write nothing, or what the last pass wrote. The caller
            # uses whatever is in memory, so the buffer counts as written.
            changed = {k: v for k, v in live.items() if k.name == RESULT_PARAMETER}
        return changed

    def _produced(
        self,
        module: torch.nn.Module,
        call: ModuleCall,
        returned: Mapping[TensorKey, Any],
        changed: dict[TensorKey, torch.Tensor],
    ) -> dict[TensorKey, torch.Tensor]:
        """Return the live tensors that a call itself produced, to be overwritten by `leave`."""
        if self._tree.is_mixer(module) or self._tree.is_embedding(module):
            any_width = {k: v for k, v in returned.items() if _is_activation(v)}
            if any_width:
                return any_width
        live = self._of_stream_width(returned)
        if not live:
            return changed
        # An output that is an unchanged argument (of a dropout, say) is not the module's own.
        given = {call.pointers[k]: value for k, value in call.args.items()}
        return {k: v for k, v in live.items() if v.data_ptr() not in given or not _equal(given[v.data_ptr()], v)}

    def _replace_offsets(self, call: ModuleCall, output: Any) -> Any:
        """Record the vectors [d] among a call's outputs; return the output with noise for them."""
        offsets = {
            k: v
            for k, v in outputs(output).items()
            if isinstance(v, torch.Tensor) and v.is_floating_point() and k.index >= 0 and v.shape == (self._tree.width,)
        }
        if offsets and self._offset_noise is not None and type(output) in (tuple, list):
            offsets = {k: self._offset_noise(f"{call.path}:{k.index}", v).to(v.dtype) for k, v in offsets.items()}
            output = type(output)(offsets.get(TensorKey("out", i), value) for i, value in enumerate(output))
        call.offsets = {k: v.float() for k, v in offsets.items()}
        return output

    def _write(self, path: str, when: str, args: tuple, kwargs: dict, output: Any) -> None:
        """Add the vectors of `writes` whose anchors are at this moment of this module's call."""
        for anchor, vectors in self._writes.items():
            if anchor.module != path or anchor.when != when:
                continue
            if not self._of_stream_width({anchor.hidden: pick(anchor.hidden, args, kwargs, output)}):
                continue
            added, added_call = (None, None) if anchor.added_term is None else self._added[anchor.added_term.module]
            hidden, other = anchor.tensors(args, kwargs, output, added)
            value = anchor.value(hidden.float(), None if other is None else other.float()) + vectors[: len(hidden)]
            if anchor.offset is not None and other is not None:
                hidden.copy_(value / anchor.scale - other.float())
                continue
            hidden.copy_(value / anchor.scale)
            if other is not None:
                other.zero_()
            if anchor.added_term is not None and added_call is not None:
                added_call.outputs[anchor.added_term.hidden].zero_()

    @contextmanager
    def _watching_model(self) -> Iterator[None]:
        """Record what the model returns, and the embeddings that it is given instead of tokens.

        Wrap forwards instead of adding hooks: a class that compiles itself calls its forward
        directly and skips hooks.
        """
        entrance = self._tree.modules[self._tree.entrance]
        parameters = parameters_of(entrance)

        def around_entrance(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._record_entrance(parameters, args, kwargs)
            return forward(*args, **kwargs)

        def around_model(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with _noise_in(kwargs.get(EMBEDDINGS_PARAMETER)):
                output = forward(*args, **kwargs)
                first = output[0] if isinstance(output, (tuple, list)) else output
                if _is_activation(first):
                    self.trace.model_output = _copy(first)
            return output

        def around_blocks(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with ExitStack() as stack:
                for number, tensor in enumerate(self._tree.beside_stream(kwargs)):
                    stack.enter_context(_noise_in(tensor, 1 + number))
                return forward(*args, **kwargs)

        owner = self._tree.model.get_submodule(self._tree.stack.rpartition(".")[0])
        with wrapped(owner, around_blocks), wrapped(entrance, around_entrance), wrapped(self._tree.model, around_model):
            yield

    def _record_entrance(self, parameters: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the embeddings that the model is given, as a call outside the blocks."""
        given = {k: v for k, v in arguments(parameters, args, kwargs).items() if k.name == EMBEDDINGS_PARAMETER}
        if not any(_is_activation(value) for value in given.values()):
            return
        path = self._tree.entrance
        self._write(path, "before", args, kwargs, None)
        call = self._new_call(path, path)
        call.args = _copies(self._of_stream_width(given))
        call.other_widths = self._of_other_widths(given)
        call.end = self._tick()
        self.trace.outside.append(call)

    def _new_call(self, path: str, local_path: str) -> ModuleCall:
        call = ModuleCall(path, local_path, self._tick(), self._num_calls[path])
        self._num_calls[path] += 1
        return call

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _of_stream_width(self, tensors: Mapping[TensorKey, Any]) -> dict[TensorKey, torch.Tensor]:
        return {k: v for k, v in tensors.items() if _is_activation(v) and v.shape[-1:] == (self._tree.width,)}

    def _of_other_widths(self, tensors: Mapping[TensorKey, Any]) -> dict[TensorKey, torch.Tensor]:
        return {k: _copy(v) for k, v in tensors.items() if _is_activation(v) and v.shape[-1] != self._tree.width}


@contextmanager
def wrapped(module: torch.nn.Module, around: Callable[..., Any]) -> Iterator[None]:
    """Call `around(forward, args, kwargs)` instead of the module's forward."""
    forward, instance_forward = module.forward, module.__dict__.get("forward")

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(forward, args, kwargs)

    module.forward = wrapper
    try:
        yield
    finally:
        if instance_forward is None:
            del module.forward
        else:
            module.forward = instance_forward


@contextmanager
def _noise_in(embeddings: Any, seed: int = 0) -> Iterator[None]:
    """Fill a buffer of embeddings with the same noise in every pass, and restore it.

    It starts as all zeros, from which nothing can be inferred, and blocks may write into it.
    """
    if not _is_activation(embeddings):
        yield
        return
    saved = embeddings.clone()
    embeddings.copy_(torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(seed)))
    try:
        yield
    finally:
        embeddings.copy_(saved)


def _is_activation(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 2


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.float32, copy=True).reshape(-1, tensor.shape[-1])


def _copies(tensors: Mapping[TensorKey, torch.Tensor]) -> dict[TensorKey, torch.Tensor]:
    return {key: _copy(tensor) for key, tensor in tensors.items()}


def _pointers(tensors: Mapping[TensorKey, torch.Tensor]) -> dict[TensorKey, int]:
    return {key: tensor.data_ptr() for key, tensor in tensors.items()}


def _shapes(values: Mapping[TensorKey, Any]) -> dict[TensorKey, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in values.items() if _is_activation(value)}


def _equal(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    return bool(torch.equal(copy, _copy(tensor)))
