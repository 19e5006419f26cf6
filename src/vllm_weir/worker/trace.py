"""The probe's recorder: which tensors pass which modules of which block, in what order, in one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from vllm_weir.worker.anchors import Anchor, Key, arguments, outputs, parameters_of, pick

OUTSIDE = -1
"""Block number of modules that belong to none."""


@dataclass
class Call:
    """One call of a module.

    Attributes:
        path: from the model; `local`: from its block.
        start, end: order of events.
        args, out: tensors of the stream's width, float32 [tokens, d], as they came and as they were returned.
        after: the same arguments once more if the call changed them in place.
        shapes: of every floating-point tensor among arguments and results.
        pointers: addresses of the tensors in `args` and `out`.
    """

    path: str
    local: str
    start: int
    end: int = 0
    args: dict[Key, torch.Tensor] = field(default_factory=dict)
    out: dict[Key, torch.Tensor] = field(default_factory=dict)
    after: dict[Key, torch.Tensor] = field(default_factory=dict)
    shapes: dict[Key, tuple[int, ...]] = field(default_factory=dict)
    pointers: dict[Key, int] = field(default_factory=dict)

    @property
    def left(self) -> dict[Key, torch.Tensor]:
        """What the call leaves behind: its results and the arguments that it wrote into."""
        return {**self.out, **self.after}


@dataclass
class Trace:
    """What was recorded.

    Attributes:
        blocks: per block, the calls of the block itself (path "") and of everything in it, by start.
        outside: calls of modules that belong to no block, and are no ancestor of one, by start.
        root: what the model returned, if it has the stream's width.
    """

    blocks: list[list[Call]]
    outside: list[Call]
    root: torch.Tensor | None = None


@dataclass(frozen=True)
class Scene:
    """The module tree as the probe sees it.

    Attributes:
        model: all of it.
        stack: path of the blocks' list; `blocks`: index -> block, for those that are here.
        width: of the stream.
        is_core: whether a module mixes tokens (attention, linear attention, a state-space layer).
        is_embedding: whether a module looks tokens up.
    """

    model: torch.nn.Module
    stack: str
    blocks: dict[int, torch.nn.Module]
    num_layers: int
    width: int
    is_core: Callable[[torch.nn.Module], bool]
    is_embedding: Callable[[torch.nn.Module], bool]

    @cached_property
    def modules(self) -> dict[str, torch.nn.Module]:
        """Every module of the model by path; one that stands in several places comes with the first."""
        return dict(self.model.named_modules())

    def members(self) -> Iterator[tuple[int, str, str, torch.nn.Module]]:
        """(block or OUTSIDE, path, path in the block, module); ancestors of the blocks are left out.

        A module that stands in several places comes with the first.
        """
        prefix = f"{self.stack}."
        for path, module in self.modules.items():
            if path == "" or path == self.stack or self.stack.startswith(f"{path}."):
                continue
            if not path.startswith(prefix):
                yield OUTSIDE, path, path, module
                continue
            number, _, local = path.removeprefix(prefix).partition(".")
            if int(number) in self.blocks:
                yield int(number), path, local, module

    def shared(self) -> set[str]:
        """Paths of modules in a block that other blocks use as well."""
        places: dict[int, list[tuple[str, str]]] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            if path.startswith(f"{self.stack}."):
                places.setdefault(id(module), []).append((path.removeprefix(f"{self.stack}.").split(".")[0], path))
        return {path for found in places.values() if len({b for b, _ in found}) > 1 for _, path in found}


Override = Callable[[int, str, Call, Mapping[Key, torch.Tensor]], None]
"""(block, path, call, live tensors by key) -> None; writes into the tensors before they are recorded."""


class Recorder:
    """Records one pass.

    Args:
        scene: what is watched.
        enter: called with a block's live argument tensors before they are recorded.
        leave: called with the live tensors that any module leaves behind before they are recorded.
        writes: what to add at anchors, [tokens, d] float32 each; after `enter` and `leave`, before the recording.
    """

    def __init__(
        self,
        scene: Scene,
        enter: Override | None = None,
        leave: Override | None = None,
        writes: Mapping[Anchor, torch.Tensor] | None = None,
    ) -> None:
        self._scene, self._enter, self._leave = scene, enter, leave
        self._writes = dict(writes or {})
        self._clock = 0
        self.trace = Trace([[] for _ in range(scene.num_layers)], [])
        self._handles: list[Any] = []
        self._open: dict[int, list[Call]] = {}
        self._within: list[int] = []

    @contextmanager
    def recording(self) -> Iterator[Trace]:
        """Record whatever runs inside; hooks are gone afterwards."""
        try:
            for block, path, local, module in self._scene.members():
                self._watch(block, path, local, module)
            self._handles.append(self._scene.model.register_forward_hook(self._ended))
            yield self.trace
        finally:
            for handle in self._handles:
                handle.remove()

    def _watch(self, block: int, path: str, local: str, module: torch.nn.Module) -> None:
        names = parameters_of(module)

        def before(module, args, kwargs):
            given = arguments(names, args, kwargs)
            call = Call(path, local, self._tick())
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
            (self.trace.outside if inside == OUTSIDE else self.trace.blocks[inside]).append(call)
            self._open.setdefault(id(module), []).append(call)

        def after(module, args, kwargs, output):
            call = self._open[id(module)].pop()
            given = self._wide(arguments(names, args, kwargs))
            out = self._wide(outputs(output))
            changed = {k: v for k, v in given.items() if k in call.args and not _same(call.args[k], v)}
            call.shapes |= {k: tuple(v.shape) for k, v in outputs(output).items() if _floating(v)}
            if self._leave is not None:
                core = self._scene.is_core(module)
                # What a module hands on as it came (dropout) is not its own.
                came = {call.pointers[k]: v for k, v in call.args.items()}
                made = {k: v for k, v in out.items() if v.data_ptr() not in came or not _same(came[v.data_ptr()], v)}
                any_width = {k: v for k, v in outputs(output).items() if _floating(v)} if core else {}
                self._leave(block, path, call, any_width or made or ({} if out else changed))
            self._write(path, "after", args, kwargs, output)
            call.after = {k: _copy(v) for k, v in changed.items()}
            call.out = {k: _copy(v) for k, v in out.items()}
            call.pointers |= {k: v.data_ptr() for k, v in out.items()}
            call.end = self._tick()
            if local == "":
                self._within.pop()

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def _ended(self, _module, _args, output) -> None:
        first = output[0] if isinstance(output, (tuple, list)) else output
        if _floating(first) and first.shape[-1] == self._scene.width:
            self.trace.root = _copy(first)

    def _write(self, path: str, when: str, args, kwargs, output) -> None:
        for anchor, what in self._writes.items():
            if anchor.module != path or anchor.when != when:
                continue
            if not self._wide({anchor.hidden: pick(anchor.hidden, args, kwargs, output)}):
                continue
            hidden, residual = anchor.tensors(args, kwargs, output)
            value = hidden.float() if residual is None else hidden.float() + residual.float()
            hidden.copy_(value + what[: len(value)] / anchor.scale)
            if residual is not None:
                residual.zero_()

    def _wide(self, tensors: Mapping[Key, Any]) -> dict[Key, torch.Tensor]:
        return {k: v for k, v in tensors.items() if _floating(v) and v.shape[-1:] == (self._scene.width,)}

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 2


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.float32, copy=True).reshape(-1, tensor.shape[-1])


def _same(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    return bool(torch.equal(copy, _copy(tensor)))
