"""The probe's recorder: which tensors pass which modules of which block, in what order, in one forward pass."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_weir.worker.discovery.anchors import Anchor, TensorKey, arguments, outputs, parameters_of, pick
from vllm_weir.worker.discovery.module_tree import OUTSIDE, ModuleTree

EMBEDS = "inputs_embeds"
"""The parameter that embeddings are given by, where the runner looks tokens up before it calls the model."""
RESULT = "output"
"""The parameter that a token mixer of vLLM's writes its result into, where it returns none."""


@dataclass
class ModuleCall:
    """One call of a module.

    Attributes:
        path: from the model; `local`: from its block.
        start, end: order of events.
        turn: how many calls of this module in this pass came before it.
        args, out: tensors of the stream's width, float32 [tokens, d], as they came and as they were returned.
        after: the same arguments once more if the call changed them in place, or is known to.
        offsets: vectors [d] among its results, float32: biases that the caller is to add.
        narrow: outside the blocks, tensors of other widths among arguments and results, as they came.
        shapes: of every floating-point tensor among arguments and results.
        pointers: addresses of the tensors in `args` and `out`.
    """

    path: str
    local: str
    start: int
    turn: int = 0
    end: int = 0
    args: dict[TensorKey, torch.Tensor] = field(default_factory=dict)
    out: dict[TensorKey, torch.Tensor] = field(default_factory=dict)
    after: dict[TensorKey, torch.Tensor] = field(default_factory=dict)
    offsets: dict[TensorKey, torch.Tensor] = field(default_factory=dict)
    narrow: dict[TensorKey, torch.Tensor] = field(default_factory=dict)
    shapes: dict[TensorKey, tuple[int, ...]] = field(default_factory=dict)
    pointers: dict[TensorKey, int] = field(default_factory=dict)

    @property
    def left(self) -> dict[TensorKey, torch.Tensor]:
        """What the call leaves behind: its results and the arguments that it wrote into."""
        return {**self.out, **self.after}

    @property
    def behind(self) -> dict[TensorKey, torch.Tensor]:
        """All that whoever made the call has in hand after it."""
        return {**self.args, **self.left}

    @property
    def handed(self) -> list[TensorKey]:
        """Its results, and then what it wrote into and did not return."""
        returned = {self.pointers[key] for key in self.out}
        return [*sorted(self.out), *(key for key in sorted(self.after) if self.pointers[key] not in returned)]


@dataclass
class Trace:
    """What was recorded.

    Attributes:
        blocks: per block, the calls of the block itself (path "") and of everything in it, by start.
        outside: calls of modules that belong to no block, and are no ancestor of one, by start.
        root: what the model returned, the first of it, float32 [tokens, any width].
    """

    blocks: list[list[ModuleCall]]
    outside: list[ModuleCall]
    root: torch.Tensor | None = None


def terms_at(calls: Sequence[ModuleCall], anchor: Anchor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """`hidden` of a point and what stands beside it, in recorded calls; None if they are not among them."""
    call = next((c for c in calls if c.path == anchor.module), None)
    tensors = {} if call is None else call.behind if anchor.when == "after" else call.args
    hidden = tensors.get(anchor.hidden)
    if call is None or hidden is None:
        return None
    if anchor.beside is not None:
        beside = anchor.beside
        other = next((c.out[beside.hidden] for c in calls if c.path == beside.module), None)
        return None if other is None else (hidden, other)
    if anchor.offset is not None:
        return hidden, call.offsets[anchor.offset]
    return hidden, None if anchor.residual is None else tensors.get(anchor.residual)


def value_at(calls: Sequence[ModuleCall], anchor: Anchor) -> torch.Tensor | None:
    """The value of a point in recorded calls, float32 [tokens, d]; None if it is not among them."""
    terms = terms_at(calls, anchor)
    return None if terms is None else anchor.value(*terms)


Override = Callable[[int, str, ModuleCall, Mapping[TensorKey, torch.Tensor]], None]
"""(block, path, call, live tensors by key) -> None; writes into the tensors before they are recorded."""


class Recorder:
    """Records one pass.

    Args:
        tree: what is watched.
        enter: called with a block's live argument tensors before they are recorded.
        leave: called with the live tensors that any module leaves behind before they are recorded.
        writes: what to add at anchors, [tokens, d] float32 each; after `enter` and `leave`, before the recording.
        offset: (name, vector) -> what a module returns instead of a vector [d].
    """

    def __init__(
        self,
        tree: ModuleTree,
        enter: Override | None = None,
        leave: Override | None = None,
        writes: Mapping[Anchor, torch.Tensor] | None = None,
        offset: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._tree, self._enter, self._leave, self._offset = tree, enter, leave, offset
        self._writes = dict(writes or {})
        self._beside = {a.beside.module: a.beside.hidden for a in self._writes if a.beside is not None}
        self._kept: dict[str, tuple[torch.Tensor, ModuleCall]] = {}
        self._clock = 0
        self._num_calls: Counter[str] = Counter()
        self.trace = Trace([[] for _ in range(tree.num_layers)], [])
        self._handles: list[Any] = []
        self._open: dict[int, list[ModuleCall]] = {}
        self._within: list[int] = []

    @contextmanager
    def recording(self) -> Iterator[Trace]:
        """Record whatever runs inside; hooks are gone afterwards."""
        try:
            for block, path, local, module in self._tree.members():
                self._watch(block, path, local, module)
            with self._watching_the_ends():
                yield self.trace
        finally:
            for handle in self._handles:
                handle.remove()

    @contextmanager
    def _watching_the_ends(self) -> Iterator[None]:
        # Not by a hook: a class that compiles itself calls its forward past them.
        def around(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with _noise_in(kwargs.get(EMBEDS)):
                output = forward(*args, **kwargs)
                first = output[0] if isinstance(output, (tuple, list)) else output
                if _floating(first):
                    self.trace.root = _copy(first)
            return output

        path = self._tree.entrance
        module = self._tree.modules[path]
        names = parameters_of(module)

        def enter(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._record_entrance(path, names, args, kwargs)
            return forward(*args, **kwargs)

        with _wrapped(module, enter), _wrapped(self._tree.model, around):
            yield

    def _record_entrance(self, path: str, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The embeddings that the model is given instead of tokens, as an argument of a call outside the blocks."""
        given = {key: value for key, value in arguments(names, args, kwargs).items() if key.name == EMBEDS}
        if not any(_floating(value) for value in given.values()):
            return
        self._write(path, "before", args, kwargs, None)
        call = ModuleCall(path, path, self._tick(), self._num_calls[path])
        self._num_calls[path] += 1
        call.args = {key: _copy(value) for key, value in self._wide(given).items()}
        call.narrow = self._narrow(given)
        call.end = self._tick()
        self.trace.outside.append(call)

    def _watch(self, block: int, path: str, local: str, module: torch.nn.Module) -> None:
        names = parameters_of(module)

        def before(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            given = arguments(names, args, kwargs)
            call = ModuleCall(path, local, self._tick(), self._num_calls[path])
            self._num_calls[path] += 1
            call.shapes = {k: tuple(v.shape) for k, v in given.items() if _floating(v)}
            live = self._wide(given)
            if local == "" and self._enter is not None:
                self._enter(block, path, call, live)
            self._write(path, "before", args, kwargs, None)
            call.pointers = {k: v.data_ptr() for k, v in live.items()}
            call.args = {k: _copy(v) for k, v in live.items()}
            if local == "":
                self._within.append(block)
            # Where it is called counts: a module may be used by several blocks.
            inside = self._within[-1] if self._within else OUTSIDE
            if inside == OUTSIDE:
                call.narrow = self._narrow(given)
            (self.trace.outside if inside == OUTSIDE else self.trace.blocks[inside]).append(call)
            self._open.setdefault(id(module), []).append(call)

        def after(module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
            call = self._open[id(module)].pop()
            given = self._wide(arguments(names, args, kwargs))
            output = self._with_offsets(path, call, output)
            out = self._wide(outputs(output))
            changed = {k: v for k, v in given.items() if k in call.args and not _same(call.args[k], v)}
            if not changed and not any(_floating(v) for v in outputs(output).values()):
                # Without a cache it may write nothing: what its caller takes up is whatever the memory held. Or that
                # was the very same, from the pass before.
                changed = {k: v for k, v in given.items() if k.name == RESULT}
            call.shapes |= {k: tuple(v.shape) for k, v in outputs(output).items() if _floating(v)}
            if self._leave is not None:
                free = self._tree.is_core(module) or self._tree.is_embedding(module)
                # What a module hands on as it came (dropout) is not its own.
                came = {call.pointers[k]: v for k, v in call.args.items()}
                made = {k: v for k, v in out.items() if v.data_ptr() not in came or not _same(came[v.data_ptr()], v)}
                any_width = {k: v for k, v in outputs(output).items() if _floating(v)} if free else {}
                self._leave(block, path, call, any_width or made or ({} if out else changed))
            self._write(path, "after", args, kwargs, output)
            call.after = {k: _copy(v) for k, v in changed.items()}
            call.out = {k: _copy(v) for k, v in out.items()}
            call.pointers |= {k: v.data_ptr() for k, v in out.items()}
            if path in self._beside:
                self._kept[path] = pick(self._beside[path], args, kwargs, output), call
            call.end = self._tick()
            if local == "":
                self._within.pop()
            if not self._within:
                call.narrow |= self._narrow(outputs(output))
            return output

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def _with_offsets(self, path: str, call: ModuleCall, output: Any) -> Any:
        """What a call returned, its vectors [d] recorded, and replaced if they are to be."""
        found = {k: v for k, v in outputs(output).items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
        found = {k: v for k, v in found.items() if k.index >= 0 and v.shape == (self._tree.width,)}
        if found and self._offset is not None and type(output) in (tuple, list):
            found = {k: self._offset(f"{path}:{k.index}", v).to(v.dtype) for k, v in found.items()}
            output = type(output)(found.get(TensorKey("out", i), value) for i, value in enumerate(output))
        call.offsets = {k: v.float() for k, v in found.items()}
        return output

    def _write(self, path: str, when: str, args: tuple, kwargs: dict, output: Any) -> None:
        for anchor, what in self._writes.items():
            if anchor.module != path or anchor.when != when:
                continue
            if not self._wide({anchor.hidden: pick(anchor.hidden, args, kwargs, output)}):
                continue
            kept, call = self._kept[anchor.beside.module] if anchor.beside is not None else (None, None)
            hidden, other = anchor.tensors(args, kwargs, output, kept)
            value = anchor.value(hidden.float(), None if other is None else other.float()) + what[: len(hidden)]
            if anchor.offset is not None and other is not None:
                hidden.copy_(value / anchor.scale - other.float())
                continue
            hidden.copy_(value / anchor.scale)
            if other is not None:
                other.zero_()
            if anchor.beside is not None and call is not None:
                call.out[anchor.beside.hidden].zero_()

    def _wide(self, tensors: Mapping[TensorKey, Any]) -> dict[TensorKey, torch.Tensor]:
        return {k: v for k, v in tensors.items() if _floating(v) and v.shape[-1:] == (self._tree.width,)}

    def _narrow(self, tensors: Mapping[TensorKey, Any]) -> dict[TensorKey, torch.Tensor]:
        return {k: _copy(v) for k, v in tensors.items() if _floating(v) and v.shape[-1] != self._tree.width}

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


@contextmanager
def _wrapped(module: torch.nn.Module, around: Callable[..., Any]) -> Iterator[None]:
    """`around(forward, args, kwargs)` instead of the module's forward."""
    forward, own = module.forward, module.__dict__.get("forward")

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(forward, args, kwargs)

    module.forward = wrapper
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


@contextmanager
def _noise_in(embeddings: Any) -> Iterator[None]:
    """The same noise in every pass, where a model is given embeddings instead of tokens.

    The runner's buffer for them holds zeros at first, which prove nothing, and blocks may write into it.
    """
    if not _floating(embeddings):
        yield
        return
    kept = embeddings.clone()
    embeddings.copy_(torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(0)))
    try:
        yield
    finally:
        embeddings.copy_(kept)


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 2


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.float32, copy=True).reshape(-1, tensor.shape[-1])


def _same(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    return bool(torch.equal(copy, _copy(tensor)))
