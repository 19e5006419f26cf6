"""Reference rows from transformers in fp32, and the error against them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def parameter_count(model: str) -> int | None:
    """Count a model's parameters from its configuration; None if transformers cannot build it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).num_parameters()
    except (ValueError, KeyError, ImportError, AttributeError, NotImplementedError):
        return None


@torch.no_grad()
def reference_rows(model: str, token_ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return ``resid_post`` of every block, float32 [layers, tokens, d], for each sequence.

    Eager attention, no cache. The rows are read from the blocks, because transformers' last
    ``hidden_states`` come after the final norm.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    count = network.config.get_text_config().num_hidden_layers
    stacks = [m for m in network.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    if len(stacks) != 1:
        raise ValueError(f"{len(stacks)} stacks of {count} blocks in {type(network).__name__}")
    block_outputs: list[torch.Tensor] = []
    for block in stacks[0]:
        block.register_forward_hook(
            lambda _m, _a, out: block_outputs.append((out[0] if isinstance(out, tuple) else out)[0])
        )
    rows = []
    for ids in token_ids:
        block_outputs.clear()
        network(input_ids=torch.tensor([list(ids)]), use_cache=False)
        rows.append(torch.stack(block_outputs))
    return rows


def worst_error(rows: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    """Return the largest max|difference| / max|reference| of a layer of a sequence.

    Args:
        rows: [layers, tokens, d] for each sequence.
        reference: of the same shapes.
    """
    worst = 0.0
    for captured, expected in zip(rows, reference, strict=True):
        if captured.shape != expected.shape:
            raise ValueError(f"shapes differ: {tuple(captured.shape)} and {tuple(expected.shape)}")
        difference, scale = (captured - expected).abs().amax((1, 2)), expected.abs().amax((1, 2))
        worst = max(worst, float((difference / scale).max()))
    return worst
