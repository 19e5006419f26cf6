"""Wrappers for speculative decoding: how many of a step's tokens are drafts, and which of these were accepted."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

from vllm_weir.schema.engine_traits import PLAIN_ENGINE, EngineTraits
from vllm_weir.worker.runtime import WorkerRuntime


def traits_of(config: Any) -> EngineTraits:
    """Return the traits of an engine with this VllmConfig."""
    speculative = config.speculative_config
    if speculative is None:
        return PLAIN_ENGINE
    return EngineTraits(
        draft_tokens=speculative.num_speculative_tokens,
        drafts_ahead=bool(config.scheduler_config.async_scheduling),
    )


def drafts_of(scheduler_output: Any, request_ids: Sequence[str]) -> list[int] | None:
    """Return how many of each request's tokens are drafts in a step of runner V1; None if none are."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    return [len(drafts.get(request_id, ())) for request_id in request_ids] if drafts else None


@contextlib.contextmanager
def without_drafter(runner: Any) -> Iterator[None]:
    """Let dummy passes run the target model alone: a draft model may share modules with it."""
    for owner, name in (("drafter", "dummy_run"), ("speculator", "propose")):
        drafter = getattr(runner, owner, None)
        if hasattr(drafter, name):
            with patch.object(drafter, name, lambda *_args, **_kwargs: None):
                yield
            return
    yield


def patch_sample_tokens(runner: Any, runtime: WorkerRuntime) -> None:
    """Tell the runtime how many tokens each step samples for a request, once that is known on the host."""
    sample_tokens = runner.sample_tokens

    @functools.wraps(sample_tokens)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        output = sample_tokens(*args, **kwargs)
        runtime.steps.note_sampled(_sampled(output))
        return output

    runner.sample_tokens = wrapper


def _sampled(output: Any) -> Callable[[], Mapping[str, int]]:
    """Return a function that waits for what `sample_tokens` has returned, and counts each request's tokens."""
    if (copied := getattr(output, "copy_event", None)) is not None:  # runner V2
        return functools.partial(_sampled_v2, output, copied)
    if (copied := getattr(output, "async_copy_ready_event", None)) is not None:  # runner V1, asynchronous scheduling
        return functools.partial(_sampled_ahead, output, output.sampled_token_ids_cpu, copied)
    sampled = {} if output is None else dict(zip(output.req_ids, map(len, output.sampled_token_ids), strict=True))
    return lambda: sampled


def _sampled_v2(output: Any, copied: Any) -> Mapping[str, int]:
    copied.synchronize()
    return dict(zip(output.model_runner_output.req_ids, output.num_sampled_tokens_np.tolist(), strict=False))


def _sampled_ahead(output: Any, token_ids: Any, copied: Any) -> Mapping[str, int]:
    copied.synchronize()
    counts = ((token_ids >= 0) & (token_ids < output.vocab_size)).sum(1).tolist()
    return dict(zip(output._model_runner_output.req_ids, counts, strict=False))
