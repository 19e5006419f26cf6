"""`RecordedModel`: a model that is run and recorded a few times before it is compiled.

It holds what all steps of discovery share, and the baseline: a recorded pass with the model's own
weights, in which only token mixers and the embedding return noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from vllm_weir.worker.discovery.anchors import Anchor
from vllm_weir.worker.discovery.matcher import Matcher
from vllm_weir.worker.discovery.module_tree import OUTSIDE, ModuleTree, Run
from vllm_weir.worker.discovery.noise import mixer_noise
from vllm_weir.worker.discovery.recorder import Overwrite, Recorder
from vllm_weir.worker.discovery.trace import Trace


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
