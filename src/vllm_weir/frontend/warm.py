"""Preparing an engine for requests before they come; see `vllm_weir.api.warm`."""

from __future__ import annotations

import inspect
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_weir.errors import WeirError, brief
from vllm_weir.frontend.admission.admitted import warming_up
from vllm_weir.frontend.engine import Engine
from vllm_weir.frontend.engine_frontend import EngineFrontend
from vllm_weir.frontend.lookup import ask_workers, engine_of, frontend_of, view_of
from vllm_weir.schema.fields import is_int

if TYPE_CHECKING:
    from vllm import SamplingParams

logger = logging.getLogger(__name__)
WARM = "weir_warm"
TOKENS = 3
"""Tokens that a request generates at most: the second one is of the first step that decodes."""
TOKEN_ID = 10
"""The token of prompts; the lowest ids are special tokens."""
MOST = 256
"""Different requests that one call prepares for."""


class Warmed(NamedTuple):
    """What `weir.warm` has done.

    Attributes:
        tap_sets: how many different sets of hook points steps with such requests need.
        graphs: CUDA graphs that were captured, on each device.
        failed: graphs that could not be captured, for which the log says why.
        without_graphs: how many of `tap_sets` have no graphs: their steps call what no graph can hold,
            or the engine has graphs for too many others.
        graph_bytes: memory of all devices that the graphs took.
        pinned_bytes: host memory that was pinned.
        seconds: how long all of it took.
    """

    tap_sets: int
    graphs: int
    failed: int
    without_graphs: int
    graph_bytes: int
    pinned_bytes: int
    seconds: float


class _WarmUp:
    """The requests that warm an engine up, and what its workers are told once they have run."""

    def __init__(
        self,
        llm: Any,
        params: Sequence[SamplingParams],
        batch_sizes: int | Sequence[int] | None,
        prompt: Any,
        host_bytes: int | None,
    ) -> None:
        self.began = time.perf_counter()
        self.frontend, self.engine = frontend_of(llm), engine_of(llm)
        _check_params(params)
        self._params, self._prompt = params, prompt
        self._most, self._host_bytes = _most(batch_sizes), host_bytes
        if host_bytes is not None and (not is_int(host_bytes) or host_bytes < 0):
            raise WeirError(f"expected a number of bytes, 0 or more, got {brief(host_bytes)}", "host_bytes")
        self.frontend.engine.require_capabilities()
        if self.frontend.pacing.live:
            raise WeirError("the engine has unfinished requests; call it again once they are done", "llm")
        self._wanted: list[tuple[bytes, int]] = []
        self._captures = False

    def requests(self) -> Iterator[tuple[Any, SamplingParams]]:
        """Yield (prompt, params) of requests that ask the same of Weir, generate little and leave nothing behind."""
        from vllm import SamplingParams

        for one in self._params:
            tokens = min(TOKENS, one.max_tokens or TOKENS)
            extras = dict(one.extra_args or {})
            # Neither greedy sampling nor a seed takes numbers from the generators that others sample with.
            own = SamplingParams(
                temperature=0.0,
                seed=0,
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=one.detokenize,
                skip_reading_prefix_cache=True,
                extra_args=extras,
            )
            for prompt in self._prompts(extras, tokens):
                yield self._salted(prompt), own

    def _prompts(self, extras: dict[str, Any], tokens: int) -> Sequence[Any]:
        if self._prompt is not None:
            return [self._prompt]
        size = self.frontend.engine.vocabulary.size
        token_id = min(TOKEN_ID, size - 1) if size else TOKEN_ID
        return [[token_id] * length for length in self.frontend.warm_up_lengths(extras, tokens)]

    def _salted(self, prompt: Any) -> dict[str, Any]:
        """Return a prompt whose blocks no other request finds in the prefix cache."""
        vocabulary = self.frontend.engine.vocabulary
        if isinstance(prompt, str):
            tokenizer: Any = vocabulary.tokenizer
            if tokenizer is None:
                raise WeirError("the engine has no tokenizer; give token ids", "prompt")
            prompt = tokenizer(prompt)["input_ids"]
        fields = dict(prompt) if isinstance(prompt, dict) else {"type": "token", "prompt_token_ids": list(prompt)}
        return {**fields, "cache_salt": f"weir-{secrets.token_hex(8)}"}

    def take(self, output: Any) -> None:
        view = view_of(output.outputs[0])
        if view is not None:
            spec = view.pending.admitted.engine_spec
            self._wanted.append((spec.wire, len(output.prompt_token_ids)))
            self._captures = self._captures or bool(spec.captures.site_requests)

    @property
    def arguments(self) -> tuple[list[tuple[bytes, int]], int | None, int]:
        """What the workers are told."""
        host_bytes = self._host_bytes
        if host_bytes is None:  # what one step may fill
            known = self.frontend.engine.require_capabilities()
            row = known.d_model, known.itemsize
            host_bytes = self.frontend.settings.step_rows(*row) * row[0] * row[1] if self._captures else 0
        return self._wanted, self._most, host_bytes

    def done(self, answers: Sequence[dict[str, Any]]) -> Warmed:
        """Return what the workers have done; raise WeirError if one could not."""
        for answer in answers:
            if "error" in answer:
                raise WeirError(answer["error"], answer["field"] or "host_bytes")
        most = {name: max(answer[name] for answer in answers) for name in ("sets", "graphs", "failed", "without")}
        return Warmed(
            tap_sets=most["sets"],
            graphs=most["graphs"],
            failed=most["failed"],
            without_graphs=most["without"],
            graph_bytes=sum(answer["bytes"] for answer in answers),
            pinned_bytes=sum(answer["pinned"] for answer in answers),
            seconds=time.perf_counter() - self.began,
        )


def _check_params(params: Sequence[Any]) -> None:
    from vllm import SamplingParams

    if not 0 < len(params) <= MOST:
        raise WeirError(f"give params of 1 to {MOST} requests, got {len(params)}", "params")
    for k, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise WeirError(f"expected SamplingParams, as weir.params returns them, got {brief(one)}", f"params[{k}]")


def _most(batch_sizes: int | Sequence[int] | None) -> int | None:
    """Return the largest of the batch sizes."""
    if batch_sizes is None:
        return None
    sizes: Any = [batch_sizes] if is_int(batch_sizes) else batch_sizes
    if not isinstance(sizes, Sequence) or not sizes or not all(is_int(size) and size > 0 for size in sizes):
        raise WeirError(f"expected numbers of requests, at least 1, got {brief(batch_sizes)}", "batch_sizes")
    return int(max(sizes))


def warm(llm: Any, params: Sequence[SamplingParams], *options: Any) -> Warmed:
    """Prepare an ``LLM``; `options` are those of `vllm_weir.api.warm`."""
    if inspect.iscoroutinefunction(getattr(engine_of(llm), "collective_rpc", None)):
        raise WeirError("this engine answers only asynchronously; await warm_async", "llm")
    warm_up = _WarmUp(llm, params, *options)
    with warming_up(), warm_up.frontend.uncounted():
        for _, output in Engine(llm).stream(warm_up.requests()):
            warm_up.take(output)
        answers = warm_up.engine.collective_rpc(WARM, args=warm_up.arguments)
    return warm_up.done(answers)


async def warm_async(engine: Any, params: Sequence[SamplingParams], *options: Any) -> Warmed:
    """Do what `warm` does, for an ``AsyncLLM``."""
    await ask_workers(engine)
    warm_up = _WarmUp(engine, params, *options)
    with warming_up(), warm_up.frontend.uncounted():
        for prompt, one in warm_up.requests():
            async for output in warm_up.engine.generate(prompt, one, f"weir-warm-{secrets.token_hex(8)}"):
                last = output
            warm_up.take(last)
        answers = await warm_up.engine.collective_rpc(WARM, args=warm_up.arguments)
    return warm_up.done(answers)


def warm_hook(llm: Any, frontend: EngineFrontend, name: str, params: SamplingParams) -> None:
    """Capture the graphs of a hook that was registered, whose requests have `params`, where there are any.

    Requests that run now, an engine that answers only asynchronously, and a hook that does not run as it is
    (an arg may be left to requests) put that off to the first request, and the log says so.
    """
    hook = frontend.names.hooks.find(name, "name")
    if not frontend.largest_graph or hook.mode != "compiled" or hook.state:
        return
    try:
        done = warm(llm, [params], None, None, 0)
    except WeirError as e:
        logger.warning("The CUDA graphs of the hook %r are captured when requests first need them: %s", name, e)
    else:
        logger.info("Weir captured %d CUDA graphs for the hook %r in %.1f s", done.graphs, name, done.seconds)
