"""Random weights inside vLLM, for architectures that transformers has no class for: `load_format="weir_random"`.

The weights are vLLM's own parameters, drawn as `build.fill` draws a checkpoint's, before vLLM packs them for its
kernels.
"""

from __future__ import annotations

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from tests.conformance.zoo.build import STATE, fill

LOAD_FORMAT = "weir_random"


@register_model_loader(LOAD_FORMAT)
class RandomLoader(BaseModelLoader):
    """Draws every parameter instead of reading it."""

    def download_model(self, model_config) -> None:
        """There is nothing to fetch."""

    def load_weights(self, model: torch.nn.Module, model_config) -> None:
        """Give every parameter its value."""
        for path, parameter in model.named_parameters():
            drawn = parameter.ndim >= 2 and not path.endswith(STATE)
            if drawn or not parameter.is_floating_point():
                continue
            # Some are made without a value: they hold what their memory held, and have to be the same each time.
            if path.endswith(("bias", "A_log", "sink", "sinks")):
                parameter.data.zero_()
            else:
                parameter.data.nan_to_num_(0.0, 0.0, 0.0).clamp_(-4.0, 4.0)
        fill(model, type(model).__name__)
