"""A model's recorded passes: with its own weights, and with noise in their place."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from vllm_weir.worker.discovery.anchors import Anchor, ModuleCall, TensorKey, Trace
from vllm_weir.worker.discovery.matcher import Matcher
from vllm_weir.worker.discovery.module_tree import OUTSIDE, ModuleTree, Run
from vllm_weir.worker.discovery.recorder import Overwrite, Recorder
from vllm_weir.worker.discovery.stream_ports import StreamPorts, alike

# Noise in place of a model's tensors, so that an equation between tensors proves an addition.
#
# In a pass with the model's own weights two tensors may be nearly equal by chance. With noise they
# are equal only if the model really copies or adds them. `enter_noise` replaces the stream that
# enters each block, `leave_noise` what the parts of a block return, and `mixer_noise` only what
# depends on a KV cache or on the dummy tokens of the pass. All are `Overwrite` functions of a
# `Recorder`.

NoiseLevel = Literal["children", "leaves"]
"""Which modules of a block leave noise: its children, or modules without submodules.

The leaves are for blocks that make their additions deeper down.
"""
LEVELS: tuple[NoiseLevel, ...] = ("children", "leaves")


def noise(name: str, like: torch.Tensor) -> torch.Tensor:
    """Return standard normal float32 of `like`'s shape, for a name the same on every rank and in every pass."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(like.shape, generator=generator).to(like.device)


def enter_noise(ports: StreamPorts) -> Overwrite:
    """Return an overwrite of the stream that enters a block."""

    def enter(_block: int, call: ModuleCall, live: Mapping[TensorKey, torch.Tensor]) -> None:
        for port in (ports.hidden_in, ports.residual_in):
            key = alike(port, live) if port is not None else None
            if key is not None and key in live:
                live[key].copy_(noise(f"{call.path}:{key.name or key.index}", live[key]))

    return enter


def leave_noise(tree: ModuleTree, level: NoiseLevel, mixers: set[str]) -> Overwrite:
    """Return an overwrite of what mixers, parts of blocks, embedding and final norm produce."""

    def leave(block: int, call: ModuleCall, live: Mapping[TensorKey, torch.Tensor]) -> None:
        module = tree.modules[call.path]
        is_leaf = next(module.children(), None) is None
        if block == OUTSIDE:
            is_part = is_leaf or tree.is_embedding(module)
        elif level == "children":
            is_part = call.path in mixers or (call.local_path != "" and "." not in call.local_path)
        else:
            is_part = call.path in mixers or (call.local_path != "" and is_leaf)
        if is_part:
            _fill(call, live)

    return leave


def mixer_noise(tree: ModuleTree, mixers: set[str]) -> Overwrite:
    """Return an overwrite of what token mixers and the embedding produce.

    Without a KV cache attention returns nothing of use, and all tokens of the pass are the same.
    """

    def leave(_block: int, call: ModuleCall, live: Mapping[TensorKey, torch.Tensor]) -> None:
        if call.path in mixers or tree.is_embedding(tree.modules[call.path]):
            _fill(call, live)

    return leave


def _fill(call: ModuleCall, live: Mapping[TensorKey, torch.Tensor]) -> None:
    """Overwrite the arguments that a call wrote into, or else the first of its outputs.

    Name the noise by the module and the count of its own calls, not of all calls: tuning of kernels
    may add calls to the first pass.
    """
    keys = [key for key in live if key.kind == "arg"] or list(live)[:1]
    for key in keys:
        live[key].copy_(noise(f"{call.path}:{call.occurrence}:{key.index}", live[key]))


@dataclass(frozen=True)
class RecordedModel:
    """A model to be run and recorded."""

    tree: ModuleTree
    run: Run  # runs the model once, uncompiled, over a few tokens
    matcher: Matcher
    mixers: set[str]
    baseline: Trace  # the pass with the model's own weights

    @classmethod
    def start(cls, tree: ModuleTree, run: Run, dtype: torch.dtype) -> RecordedModel:
        """Find the token mixers and record the baseline."""
        mixers = {path for block, path, _, module in tree.members() if block != OUTSIDE and tree.is_mixer(module)}
        baseline = _record(tree, run, leave=mixer_noise(tree, mixers))
        not_called = mixers - {call.path for calls in baseline.blocks for call in calls}
        if not_called:
            # The Transformers backend does not call attention through its module. Treat the block's
            # child that holds it as the token mixer.
            depth = len(tree.stack.split(".")) + 2
            mixers |= {".".join(path.split(".")[:depth]) for path in not_called}
            baseline = _record(tree, run, leave=mixer_noise(tree, mixers))
        return cls(tree, run, Matcher(dtype), mixers, baseline)

    def record(
        self,
        enter: Overwrite | None = None,
        leave: Overwrite | None = None,
        writes: Mapping[Anchor, torch.Tensor] | None = None,
        offset_noise: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    ) -> Trace:
        return _record(self.tree, self.run, enter, leave, writes, offset_noise)

    def with_mixer_noise(
        self, enter: Overwrite | None = None, writes: Mapping[Anchor, torch.Tensor] | None = None
    ) -> Trace:
        return self.record(enter, mixer_noise(self.tree, self.mixers), writes)


def _record(
    tree: ModuleTree,
    run: Run,
    enter: Overwrite | None = None,
    leave: Overwrite | None = None,
    writes: Mapping[Anchor, torch.Tensor] | None = None,
    offset_noise: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
) -> Trace:
    with Recorder(tree, enter, leave, writes, offset_noise).recording() as trace:
        run()
    return trace
