"""The modules inside attention and MLP, and the record of their calls."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_weir.schema.rows import Shard
from vllm_weir.worker.discovery.anchors import Anchor, ModuleCall, TensorKey, arguments, outputs, parameters_of, pick
from vllm_weir.worker.discovery.module_tree import OUTSIDE, ModuleTree
from vllm_weir.worker.discovery.recorded_model import enter_noise, noise
from vllm_weir.worker.discovery.recorder import RESULT_PARAMETER, wrapped
from vllm_weir.worker.discovery.stream_ports import StreamPorts, alike

# What discovery is told of the modules inside attention and MLP: their kinds, and which part of a row they hold.
#
# Structure does not tell a matrix from any other module, nor how a row is divided among workers. So
# `patches.model.discovery` hands in a `PartModules`, which recognises the modules of a model.


@dataclass(frozen=True)
class Features:
    """Values that a linear module takes or returns for a token: how many there are, and which are here."""

    whole: int  # how many the whole model has
    shard: Shard  # which of them this worker's module takes or returns

    @classmethod
    def unsplit(cls, width: int) -> Features:
        """Return the features of a module that is the same on every worker."""
        return cls(width, Shard(0, width))

    @property
    def width(self) -> int:
        """How many are here."""
        return self.shard.stop - self.shard.start

    def part(self, start: int, stop: int) -> Features:
        """Return a contiguous part of these; `start` and `stop` count from the first one here."""
        return Features(self.whole, Shard(self.shard.start + start, self.shard.start + stop))


@dataclass(frozen=True)
class LinearShape:
    """A linear module."""

    inputs: Features  # of its input
    outputs: tuple[Features, ...]  # of the matrices that it merges, in the order in which their results lie in a row
    quantises_input: bool = False  # whether vLLM may fuse the quantisation of its input with what comes before


@dataclass(frozen=True)
class AttentionShape:
    """A softmax attention layer, called with queries, keys and values."""

    heads: int  # query heads of this worker
    kv_heads: int  # its key-value heads
    head_size: int  # of queries and keys
    value_size: int  # of a head of the result
    latent: bool = False  # whether it takes latent vectors in place of keys and values (MLA)


@dataclass(frozen=True)
class PartModules:
    """Recognises the modules inside attention and MLP."""

    # the shape of a softmax attention layer; None for any other module
    attention: Callable[[torch.nn.Module], AttentionShape | None]
    linear: Callable[[torch.nn.Module], LinearShape | None]  # the shape of a linear module; None for any other module
    # the number of experts of a layer that runs them in one kernel; None for any other module
    experts: Callable[[torch.nn.Module], int | None]
    ranks: int = 1  # workers among which rows are divided


@dataclass
class BlockRecord:
    """The calls of one block in one pass."""

    block: int
    tokens: int = 0
    # of the block (first) and of everything in it, by start. Their tensors are float32 on the CPU, [tokens, values];
    # shapes and pointers are those of the live tensors.
    calls: list[ModuleCall] = field(default_factory=list)
    # path of a layer of experts -> what it computed before noise replaced it
    computed: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Watched:
    """A module whose calls are recorded."""

    block: int
    path: str
    local_path: str
    replaced: bool  # whether what it returns is replaced by noise
    names: list[str]


class PartRecorder:
    """Records one pass.

    Args:
        writes: anchor -> what is added there, float32 [tokens, width].

    Attributes:
        num_calls: path -> how often a module was called in the pass.
    """

    def __init__(
        self,
        tree: ModuleTree,
        parts: PartModules,
        ports: StreamPorts,
        on_block: Callable[[BlockRecord], None],
        writes: Mapping[Anchor, torch.Tensor] | None = None,
    ) -> None:
        self._tree, self._parts, self._ports, self._on_block = tree, parts, ports, on_block
        self._enter = enter_noise(ports)
        self._writes: dict[tuple[str, str], list[tuple[Anchor, torch.Tensor]]] = {}
        for anchor, vectors in (writes or {}).items():
            self._writes.setdefault((anchor.module, anchor.when), []).append((anchor, vectors))
        self._clock = 0
        self.num_calls: Counter[str] = Counter()
        self._record: BlockRecord | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the pass that runs inside the context."""
        mixers = [path for _, path, _, module in self._tree.members() if self._tree.is_mixer(module)]
        with ExitStack() as stack:
            for block, path, local_path, module in self._tree.members():
                if block == OUTSIDE or any(path.startswith(f"{mixer}.") for mixer in mixers):
                    continue
                watched = _Watched(block, path, local_path, self._is_replaced(module), parameters_of(module))
                stack.enter_context(wrapped(module, self._around(watched)))
            yield

    def _is_replaced(self, module: torch.nn.Module) -> bool:
        parts = self._parts
        return self._tree.is_mixer(module) or parts.linear(module) is not None or parts.experts(module) is not None

    def _around(self, watched: _Watched) -> Callable[..., Any]:
        def around(forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
            self.num_calls[watched.path] += 1
            if watched.local_path == "":
                self._record = BlockRecord(watched.block)
            record = self._record
            if record is None:
                return forward(*args, **kwargs)
            call = self._begin(watched, record, args, kwargs)
            output = forward(*args, **kwargs)
            self._end(watched, record, call, args, kwargs, output)
            if watched.local_path == "":
                self._record = None
                self._on_block(record)
            return output

        return around

    def _begin(self, watched: _Watched, record: BlockRecord, args: tuple, kwargs: dict) -> ModuleCall:
        call = ModuleCall(watched.path, watched.local_path, self._tick(), self.num_calls[watched.path] - 1)
        live = _activations(arguments(watched.names, args, kwargs))
        if watched.local_path == "":
            self._enter(watched.block, call, {k: v for k, v in live.items() if v.shape[-1] == self._tree.width})
            entry = live.get(alike(self._ports.hidden_in, live))
            record.tokens = 0 if entry is None else entry.numel() // self._tree.width
        self._write(watched.path, "before", args, kwargs, None)
        call.shapes = {key: tuple(tensor.shape) for key, tensor in live.items()}
        call.pointers = {key: tensor.data_ptr() for key, tensor in live.items()}
        call.args = _copies(live, record.tokens)
        record.calls.append(call)
        return call

    def _end(
        self, watched: _Watched, record: BlockRecord, call: ModuleCall, args: tuple, kwargs: dict, output: Any
    ) -> None:
        given, returned = _activations(arguments(watched.names, args, kwargs)), _activations(outputs(output))
        if watched.replaced:
            if returned and self._parts.experts(self._tree.modules[call.path]) is not None:
                record.computed[call.path] = torch.cat([*_copies(returned, record.tokens).values()], 1)
            produced = returned or {k: v for k, v in given.items() if k.name == RESULT_PARAMETER}
            for key, tensor in produced.items():
                tensor.copy_(noise(f"part {call.path}:{call.occurrence}:{key.index}", tensor))
        self._write(watched.path, "after", args, kwargs, output)
        call.offsets = {
            key: value.float().cpu()
            for key, value in outputs(output).items()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 1
        }
        call.shapes |= {key: tuple(tensor.shape) for key, tensor in returned.items()}
        call.pointers |= {key: tensor.data_ptr() for key, tensor in returned.items()}
        call.outputs = _copies(returned, record.tokens)
        of_stream_width = {k: v for k, v in given.items() if v.shape[-1] == self._tree.width}
        after = _copies(of_stream_width, record.tokens)
        call.args_after = {k: v for k, v in after.items() if k in call.args and not torch.equal(call.args[k], v)}
        call.end = self._tick()

    def _write(self, path: str, when: str, args: tuple, kwargs: dict, output: Any) -> None:
        """Add the vectors of `writes` whose anchors are at this moment of this module's call."""
        for anchor, vectors in self._writes.get((path, when), ()):
            hidden = pick(anchor.hidden, args, kwargs, output)
            if anchor.per_head:
                hidden = hidden.flatten(1)
            start, stop = anchor.columns or (0, hidden.shape[-1])
            row = hidden[..., start:stop]
            row.add_(vectors.to(row.device).reshape(row.shape).to(row.dtype))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _activations(tensors: Mapping[TensorKey, Any]) -> dict[TensorKey, torch.Tensor]:
    return {
        key: value
        for key, value in tensors.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 2
    }


def _copies(tensors: Mapping[TensorKey, torch.Tensor], tokens: int) -> dict[TensorKey, torch.Tensor]:
    """Return the tensors whose leading dimensions count tokens (times heads), [tokens, values] each."""
    return {
        key: tensor.detach().to("cpu", torch.float32, copy=True).reshape(tokens, -1)
        for key, tensor in tensors.items()
        if _is_by_token(tuple(tensor.shape), tokens)
    }


def _is_by_token(shape: tuple[int, ...], tokens: int) -> bool:
    leading = [math.prod(shape[:n]) for n in range(1, len(shape))]
    return tokens > 0 and (tokens in leading or leading[0] % tokens == 0) and math.prod(shape) > 0
