"""One HTTP request's reply: which views belong to its choices, and what is added to its response or chunks."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.frontend.outputs.view import OutputView
from vllm_weir.frontend.receive.release import HeldSequences
from vllm_weir.server.errors import TYPES, error_body
from vllm_weir.server.lens_response import activations_field
from vllm_weir.server.request import WeirRequest
from vllm_weir.server.response_body import NOTHING, answer, new_scores, projects, whole
from vllm_weir.server.state import ServerState

DATA = "data: "
DONE = "data: [DONE]"


class ResponseBuilder:
    """Notes the views of a request's outputs and makes of them what goes out.

    Attributes:
        ask: what the request asks.
        failure: why the engine refused or failed it; known before vLLM has put it into words.
        failed: whether that is none of the client's; up to 0.28 vLLM does not know one from the other.
        several: whether there is more than one choice.
        held: its sequences.
    """

    def __init__(self, ask: WeirRequest, server: ServerState) -> None:
        self.ask = ask
        self.failure: WeirError | None = None
        self.failed = self.several = False
        self.held = HeldSequences()
        self._server = server
        self._views: dict[int, OutputView] = {}
        self._sent: dict[int, int] = {}
        self._kept: list[str] = []
        self._lens: dict[str, Any] | None = None

    def note(self, choice: int, view: OutputView | None) -> None:
        """The latest view of a choice."""
        if view is not None:
            self._views[choice] = view
            self.several |= choice > 0

    async def answers(self) -> dict[int, dict[str, Any]]:
        """Choice -> its object; raises WeirError if rows were lost or do not go into the answer."""

        def every() -> dict[int, dict[str, Any]]:
            return {i: self._answer(i) for i in sorted(self._views)}

        try:
            return every() if all(map(_at_hand, self._views.values())) else await self._server.run(every, self.discard)
        except WeirError:
            self.discard()
            raise

    @property
    def lens(self) -> dict[str, Any] | None:
        """vllm-lens's field ``activations``, once choice 0 is answered."""
        return self._lens

    async def rewrite(self, chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """The server-sent events of a stream, with what Weir adds."""
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    self._kept.clear()
                    try:
                        yield await self._rewritten(chunk)
                    except WeirError as e:  # scores on their way were lost: it ends as any stream that fails
                        if (observer := self._server.frontend.observer) is not None:
                            observer.failed()
                        yield _event(error_body(500, str(e), e.field or None))
                        yield f"{DONE}\n\n"
                        return
                    except BaseException:
                        self.discard()  # nobody will ever know the ids in it
                        raise
        finally:
            self.let_go()

    def let_go(self) -> None:
        """The answer is out, or nobody waits for it: free the rows that it was made of."""
        self._views.clear()
        self.held.release()

    def discard(self) -> None:
        """Free what was put away for chunks or responses that nobody got."""
        for key in self._kept:
            if self._server.spool is not None:
                self._server.spool.delete(key)

    def _answer(self, choice: int) -> dict[str, Any]:
        view = whole(self._views.pop(choice))
        # What vllm-lens's field carries is not sent twice.
        rows = self.ask.own or self.several
        # The event loop, which makes a receipt alone, waits for no thread.
        work = self._server.work if view.part.spec.site_requests else NOTHING
        try:
            out = answer(view, self._server.inline_bytes(self.ask.inline_bytes), self._keep, rows, work)
            if self.ask.lens and choice == 0 and not projects(view):
                with work:
                    self._lens = activations_field(view.activations(), self._server.limits.lens_bytes)
            return out
        finally:
            view.drop()

    def _keep(self, acts: Any, size: int) -> dict[str, Any]:
        where = self._server.keep(acts, size, self._kept)
        self._kept.append(where["id"])
        return where

    async def _rewritten(self, chunk: str) -> str:
        if chunk.startswith(DONE):
            if self._lens is None:
                return chunk
            return f"{_event({'activations': self._lens})}{chunk}"
        if not chunk.startswith(f"{DATA}{{"):
            return chunk
        data = json.loads(chunk[len(DATA) :])
        if "error" in data:
            if self.failure is not None and self.failure.field:
                data["error"]["param"] = self.ask.sent(self.failure).field
            if self.failed:
                data["error"] |= {"type": TYPES[500], "code": 500}
            return _event(data)
        added = [await self._add(choice) for choice in data.get("choices", ())]
        return _event(data) if any(added) else chunk

    async def _add(self, choice: dict[str, Any]) -> bool:
        """Put what is due into a chunk's choice; whether anything was."""
        index = choice["index"]
        view = self._views.get(index)
        if view is None:
            return False
        if choice.get("finish_reason") is not None:
            if _at_hand(view):
                choice["weir"] = self._final(index)
            else:
                choice["weir"] = await self._server.run(lambda: self._final(index), self.discard)
            return True
        if not self.ask.stream or not projects(view) or view.end <= (start := self._sent.get(index, 0)):
            return False
        delta = choice.get("delta") or {}
        if delta.get("role") and not delta.get("content"):
            return False  # a chat's opening: the token that the scores belong to is still to come
        self._sent[index] = view.end
        found = await self._server.run(lambda: new_scores(view, start))
        if found is not None:
            choice["weir"] = {"scores": found}
        return found is not None

    def _final(self, index: int) -> dict[str, Any]:
        try:
            return self._answer(index)
        except WeirError as e:  # the tokens are out already: the choice says what it lacks
            self.discard()
            return {"error": str(e)}


def _at_hand(view: OutputView) -> bool:
    """Whether a finished sequence's answer is a receipt alone that waits for nothing: a thread costs more than it."""
    return not view.part.spec.site_requests and view.concluded()


def _event(data: Any) -> str:
    return f"{DATA}{json.dumps(data, ensure_ascii=False, separators=(',', ':'), allow_nan=False)}\n\n"
