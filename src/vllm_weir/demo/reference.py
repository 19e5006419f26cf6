"""The check: the same rows from transformers, in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def parameter_count(model: str) -> int | None:
    """Return the number of parameters by the configuration alone, or None if transformers cannot build the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).num_parameters()
    except (ValueError, KeyError, ImportError, AttributeError, NotImplementedError):
        return None


@torch.no_grad()
def reference_rows(model: str, token_ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return ``resid_post`` of every block, float32 [layers, tokens, d], for each sequence: eager attention, no cache.

    Taken from the blocks themselves: transformers' last ``hidden_states`` are behind the final norm.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    count = net.config.get_text_config().num_hidden_layers
    stacks = [m for m in net.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    if len(stacks) != 1:
        raise ValueError(f"{len(stacks)} stacks of {count} blocks in {type(net).__name__}")
    found: list[torch.Tensor] = []
    for block in stacks[0]:
        block.register_forward_hook(lambda _m, _a, out: found.append((out[0] if isinstance(out, tuple) else out)[0]))
    result = []
    for ids in token_ids:
        found.clear()
        net(input_ids=torch.tensor([list(ids)]), use_cache=False)
        result.append(torch.stack(found))
    return result


def worst_error(rows: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    """Return the largest max|difference| / max|reference| of any layer of any sequence.

    `rows` and `reference` hold one tensor [layers, tokens, d] per sequence.
    """
    worst = 0.0
    for mine, theirs in zip(rows, reference, strict=True):
        if mine.shape != theirs.shape:
            raise ValueError(f"shapes differ: {tuple(mine.shape)} and {tuple(theirs.shape)}")
        gap, scale = (mine - theirs).abs().amax((1, 2)), theirs.abs().amax((1, 2))
        worst = max(worst, float((gap / scale).max()))
    return worst
