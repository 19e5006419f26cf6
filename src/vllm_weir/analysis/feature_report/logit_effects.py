"""Which tokens' logits a feature raises and lowers: its direction through the final norm and the unembedding."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.sae.autoencoder import SAE
from vllm_weir.schema.hooks import MODEL_HOOKS, STREAM_HOOKS

TOKENS = 10
"""Tokens of each side."""


@dataclass(frozen=True)
class LogitEffects:
    """Tokens with the change of their logit by one unit of a feature, the largest change first."""

    raised: tuple[tuple[int, float], ...]
    lowered: tuple[tuple[int, float], ...]


class CheckpointUnembedding:
    """The weight of a model's final norm, and its unembedding.

    The division by the norm of the stream, which is the same for all tokens, is left out, and so
    are a scale and a soft cap of the logits: none changes the order of the tokens.

    Args:
        weight: of the norm, float32 [d_model]: what its output is multiplied by.
        centres: whether the norm subtracts the mean, as LayerNorm does.
        matrix: [vocabulary, d_model].
    """

    def __init__(self, weight: torch.Tensor, centres: bool, matrix: torch.Tensor) -> None:
        self.weight, self.centres, self.matrix = weight, centres, matrix

    @classmethod
    def of_checkpoint(cls, model: str) -> CheckpointUnembedding:
        """Read them from a twin of a checkpoint in transformers, on the CPU."""
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        try:
            network = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
        except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as e:
            raise WeirError(f"transformers cannot load {model}: {' '.join(str(e).split())[:160]}", "model") from None
        return cls.of_network(network)

    @classmethod
    def of_network(cls, network: Any) -> CheckpointUnembedding:
        head = network.get_output_embeddings()
        if head is None:
            raise WeirError(f"{type(network).__name__} has no unembedding", "model")
        norm, width = _final_norm(network, head)
        weight, centres = _norm_weight(copy.deepcopy(norm).float(), width)
        return cls(weight, centres, head.weight.detach())

    @torch.no_grad()
    def effects(self, direction: np.ndarray, count: int = TOKENS) -> LogitEffects:
        """Return the tokens whose logits a direction of the stream raises and lowers most."""
        vector = torch.from_numpy(np.asarray(direction, np.float32))
        if vector.shape != self.weight.shape:
            raise WeirError(f"the model's stream has width {len(self.weight)}, the feature's {len(vector)}", "model")
        if self.centres:
            vector = vector - vector.mean()
        logits = torch.cat([part.float() @ (vector * self.weight) for part in self.matrix.split(1 << 15)])
        high, low = logits.topk(min(count, len(logits))), (-logits).topk(min(count, len(logits)))
        return LogitEffects(
            tuple(zip(high.indices.tolist(), high.values.tolist())),
            tuple(zip(low.indices.tolist(), (-low.values).tolist())),
        )


def check_site(sae: SAE) -> None:
    hook = sae.out_site.hook
    if hook not in STREAM_HOOKS and (hook not in MODEL_HOOKS or hook == "final_norm"):
        raise WeirError(f"its features write to {sae.out_site}, which is not the residual stream", "sae")


@torch.no_grad()
def _final_norm(network: Any, head: Any) -> tuple[torch.nn.Module, int]:
    """Return the module whose output the unembedding reads, and the width of the stream."""
    returned: list[tuple[torch.nn.Module, torch.Tensor]] = []
    read: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and not any(True for _ in module.children()):
            returned.append((module, output))

    hooks = [module.register_forward_hook(keep) for module in network.modules()]
    hooks.append(head.register_forward_pre_hook(lambda _module, inputs: read.append(inputs[0])))
    try:
        network(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    # All outputs are still there, so the first with this memory is of the module that made it.
    for module, output in returned:
        if read and output.data_ptr() == read[-1].data_ptr() and all(p.dim() < 2 for p in module.parameters()):
            return module, output.shape[-1]
    raise WeirError(f"no norm comes right before the unembedding of {type(network).__name__}", "model")


@torch.no_grad()
def _norm_weight(norm: torch.nn.Module, width: int) -> tuple[torch.Tensor, bool]:
    """Return what a norm multiplies by, and whether it subtracts the mean.

    Classes name and apply their weights differently, as 1 + weight in Gemma, so this is measured:
    rows of 1 and -1 in turn have mean 0 and norm sqrt(width), which the norm leaves as they are.
    """
    signs = torch.ones(width)
    signs[1::2] = -1

    def odd_part(row: torch.Tensor) -> torch.Tensor:
        return (norm(row[None, None])[0, 0] - norm(-row[None, None])[0, 0]) / 2

    weight = odd_part(signs) * signs
    ones = odd_part(torch.ones(width))
    return weight, bool(ones.abs().max() < 1e-3 * weight.abs().max())
