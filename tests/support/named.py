"""The engines that most engine tests share, by name: `@pytest.mark.engine("default")` and the fixture `llm`.

The tests of a name run one after the other in one process, so that its engine starts once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.drafter import SPECULATIVE
from tests.support.engines import get_llm
from tests.support.models import make_model


class Named(NamedTuple):
    """How an engine is started: its model from the directory of tiny models, and the engine's arguments."""

    model: Callable[[Path], Path]
    arguments: dict[str, Any]


def tiny_llama(root: Path) -> Path:
    return make_model("llama", "a", root)


def shipped_model(_root: Path) -> Path:
    import vllm_weir as weir

    return Path(weir.demo_model())


_WHOLE = {"block_size": 32, "max_num_seqs": 128, "max_num_batched_tokens": 4096}
ENGINES = {
    # Room for every test's batch; blocks of 32 tokens, so that short prompts fill some.
    "default": Named(tiny_llama, _WHOLE),
    # The same engine under another name, so that its many tests are two groups, which two workers share.
    "steering": Named(tiny_llama, _WHOLE),
    # Prompts are cut into chunks, and requests wait for each other.
    "small": Named(tiny_llama, {"block_size": 32, "max_num_seqs": 16, "max_num_batched_tokens": 64}),
    # A KV cache that holds two of six requests to their ends: the others are thrown out and computed again.
    "scarce": Named(
        tiny_llama,
        {
            "block_size": 32,
            "num_gpu_blocks_override": 10,
            "max_model_len": 160,
            "max_num_seqs": 6,
            "max_num_batched_tokens": 48,
        },
    ),
    "drafts": Named(
        tiny_llama,
        {"speculative_config": SPECULATIVE, "block_size": 32, "max_num_seqs": 64, "max_num_batched_tokens": 2048},
    ),
    "demo": Named(shipped_model, _WHOLE),
}


def named_llm(name: str, root: Path) -> Any:
    """Return the running engine of that name, started if another one is running.

    Args:
        root: where the tiny models live.
    """
    model, arguments = ENGINES[name]
    return get_llm(model(root), **arguments)
