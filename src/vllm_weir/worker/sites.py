"""Where the taps go: the decoder blocks of a loaded model, and which of their hook points can be served."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch

from vllm_weir.errors import WeirError
from vllm_weir.settings import Settings

VERIFIED = frozenset(
    {
        "GPT2LMHeadModel",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "OPTForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    }
)
"""Model classes whose blocks return the stream as a tensor or as (hidden, residual), compared with transformers."""


@dataclass(frozen=True)
class Trunk:
    """The decoder blocks of a model that live in this process.

    Attributes:
        blocks: block index -> module; those of other pipeline stages are absent.
        taps: taps to place here: 0 is the first block's input, L+1 the output of block L.
        hidden, residual: names of the forward arguments that carry the stream into a block; residual may be None.
    """

    blocks: dict[int, torch.nn.Module]
    taps: tuple[int, ...]
    hidden: str
    residual: str | None


def find_trunk(model: torch.nn.Module, num_layers: int, settings: Settings) -> Trunk:
    """Find the blocks by structure; raises WeirError saying why a model cannot be tapped."""
    name = type(model).__name__
    if name not in VERIFIED and settings.unverified_models != "allow":
        raise WeirError(
            f"{name} is not among the verified model classes ({', '.join(sorted(VERIFIED))}); the setting "
            "unverified_models='allow' taps it all the same, without a promise that its rows are the residual stream",
            "model",
        )
    stacks = [
        module
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers and "vision" not in path
    ]
    if len(stacks) != 1:
        raise WeirError(f"{name} has {len(stacks)} stacks of {num_layers} blocks; exactly one is needed", "model")
    blocks = {i: block for i, block in enumerate(stacks[0]) if type(block).__name__ != "PPMissingLayer"}
    if not blocks:
        return Trunk({}, (), "", None)
    parameters = inspect.signature(next(iter(blocks.values())).forward).parameters
    if "hidden_states" not in parameters:
        raise WeirError(f"the blocks of {name} take no argument named hidden_states", "model")
    layers = range(num_layers) if settings.layers == "all" else settings.layers
    wanted = set()
    for layer in layers:
        if layer >= num_layers:
            raise WeirError(
                f"block {layer} does not exist: the model has blocks 0..{num_layers - 1}", "settings.layers"
            )
        if "resid_pre" in settings.hooks or layer == 0:
            wanted.add(layer)
        if "resid_post" in settings.hooks:
            wanted.add(layer + 1)
    here = {0} if 0 in blocks else set()
    here |= {i + 1 for i in blocks}
    return Trunk(
        blocks, tuple(sorted(wanted & here)), "hidden_states", "residual" if "residual" in parameters else None
    )
