"""Stories run through vLLM: the rows that the demo keeps of them, and the time it took."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

import vllm_weir as weir
from examples.demo.stories import Story

BATCH = 50
"""Stories in one batch; bounds the memory of a large model's rows."""
MAX_TOKENS = 512
SAMPLED = 8
"""Tokens kept of each story, evenly spread over its second half, where its mood is clear."""


@dataclass
class StoryRows:
    """Rows of stories.

    Attributes:
        ends: the rows at the last token of each story's opening, and of the story, [layers, stories, 2, d].
        mean: the mean of each story's rows from its second token on, [layers, stories, d].
        sampled: rows at `SAMPLED` tokens of each story, [layers, stories * SAMPLED, d], story by
            story.
        rows: all rows of some stories, [layers, tokens, d] each.
        tokens: those stories' token ids.
        count: rows captured.
        size: their bytes.
        seconds: from the calls to the last rows' arrival.
    """

    ends: torch.Tensor
    mean: torch.Tensor
    sampled: torch.Tensor
    rows: list[torch.Tensor]
    tokens: list[list[int]]
    count: int
    size: int
    seconds: float


def compiler() -> str | None:
    """Return the path of a C++ compiler, which torch.compile needs on CPU, or None."""
    return next((found for name in ("g++", "clang++", "c++") if (found := shutil.which(name))), None)


def context_length(model: str) -> int:
    """Return the context length for stories: `MAX_TOKENS`, or less if the model has less."""
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(model).get_text_config()
    return min(MAX_TOKENS, getattr(text, "max_position_embeddings", None) or MAX_TOKENS)


def start_engine(model: str, dtype: Literal["auto", "float32"], eager: bool) -> Any:
    """Start a stock ``vllm.LLM``, into which vLLM loads Weir because it is installed."""
    from vllm import LLM
    from vllm.platforms import current_platform

    memory = {"kv_cache_memory_bytes": 1 << 30} if current_platform.is_cpu() else {"gpu_memory_utilization": 0.6}
    return LLM(
        model,
        dtype=dtype,
        max_model_len=context_length(model),
        enforce_eager=eager,
        seed=0,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **memory,
    )


def read(
    llm: Any, stories: Sequence[Story], keep: Sequence[int] = (), advance: Callable[[int], Any] | None = None
) -> StoryRows:
    """Run stories through the model and reduce their rows.

    Args:
        llm: the engine.
        stories: what is read.
        keep: indices of the stories of which all rows are kept.
        advance: called after every batch with its number of stories.
    """
    from vllm import SamplingParams

    params = weir.params(
        SamplingParams(max_tokens=1, temperature=0), capture=weir.Capture("resid_post", positions="prompt")
    )
    ends, mean, sampled, rows, tokens = [], [], [], {}, {}
    count = size = 0
    seconds = 0.0
    for first in range(0, len(stories), BATCH):
        batch = stories[first : first + BATCH]
        openings = [len(llm.get_tokenizer().encode(story.opening)) for story in batch]
        started = time.perf_counter()
        outputs = llm.generate([story.text for story in batch], params, use_tqdm=False)
        stacks = [torch.stack([out.activations[site] for site in out.activations.sites]) for out in outputs]
        seconds += time.perf_counter() - started
        for i, (out, stack, opening) in enumerate(zip(outputs, stacks, openings, strict=True), first):
            count += stack.shape[0] * stack.shape[1]
            size += stack.nbytes
            ends.append(stack[:, [opening - 1, -1]].float())
            # The first token says nothing of the story, and in most models its rows are far larger.
            mean.append(stack[:, 1:].float().mean(1))
            length = stack.shape[1]
            sampled.append(stack[:, torch.linspace(length // 2, length - 1, SAMPLED).long()])
            if i in keep:
                rows[i], tokens[i] = stack.float(), list(out.prompt_token_ids)
        if advance is not None:
            advance(len(batch))
    return StoryRows(
        ends=torch.stack(ends, 1),
        mean=torch.stack(mean, 1),
        sampled=torch.cat(sampled, 1),
        rows=[rows[i] for i in keep],
        tokens=[tokens[i] for i in keep],
        count=count,
        size=size,
        seconds=seconds,
    )
