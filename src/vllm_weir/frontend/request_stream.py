"""`RequestStream`: requests to an engine that go in while others come out, so that it never waits for more."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.frontend.lookup import engine_of, view_of

Done = Callable[[Any], None]
"""Is given the finished output of a request; may submit others."""


class RequestStream:
    """The requests of one caller to an ``LLMEngine`` that has no others."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._prefix, self._count = f"weir-{secrets.token_hex(6)}", 0
        self._waiting: dict[str, Done] = {}

    @classmethod
    def to(cls, llm: Any) -> RequestStream:
        """Return a stream to an ``LLM``, ``LLMEngine`` or Weir's drop-in class.

        Raises:
            WeirError: for another kind of engine, or one that works on other requests.
        """
        from vllm import LLMEngine

        engine = engine_of(llm)
        if not isinstance(engine, LLMEngine):
            raise WeirError(f"a sweep runs on an LLM, which {type(llm).__name__} is not", "llm")
        if engine.has_unfinished_requests():
            raise WeirError(
                "the engine has unfinished requests, whose outputs would be lost; step it until they are done, or end "
                "them with llm.llm_engine.abort_request([...])",
                "llm",
            )
        return cls(engine)

    @functools.cached_property
    def window(self) -> int:
        """Requests that are with the engine before a further one waits.

        Enough that its queue does not run empty while outputs are read.
        """
        return max(64, 2 * self._engine.vllm_config.scheduler_config.max_num_seqs)

    def submit(self, token_ids: Sequence[int], params: Any, done: Done) -> None:
        """Send a request and do not wait for it.

        Args:
            token_ids: its prompt.
            params: ``SamplingParams`` that nobody changes any more; several requests may share them.
                Their `output_kind` becomes that of finished outputs alone.
            done: called with its output, which has all completions.
        """
        params.skip_clone = True  # vLLM then makes a shallow copy
        params.output_kind = type(params.output_kind).FINAL_ONLY
        request_id = f"{self._prefix}-{self._count}"
        self._count += 1
        self._waiting[request_id] = done  # first: vLLM may have the request even if adding it fails
        self._engine.add_request(request_id, {"type": "token", "prompt_token_ids": list(token_ids)}, params)

    def wait_for_room(self) -> None:
        """Step the engine until another request may go in."""
        while len(self._waiting) >= self.window:
            self._step()

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Step the engine until `holds` returns True."""
        while not holds():
            self._step()

    def drain(self) -> None:
        """Step the engine until every request is done."""
        while self._waiting:
            self._step()

    def abort(self) -> None:
        """Take back all requests that are not done."""
        if self._waiting:
            self._engine.abort_request(list(self._waiting))
            self._waiting.clear()

    def _step(self) -> None:
        if not self._engine.has_unfinished_requests():
            raise RuntimeError("vLLM has ended, without an output of each request")
        for output in self._engine.step():
            if output.finished and (done := self._waiting.pop(output.request_id, None)) is not None:
                for completion in output.outputs:
                    if (view := view_of(completion)) is not None:
                        view.verify()
                        view.settle()
                done(output)
