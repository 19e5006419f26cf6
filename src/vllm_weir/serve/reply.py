"""One HTTP request's reply: which views belong to its choices, and what is added to its response or chunks."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.frontend.view import View
from vllm_weir.serve.answer import answer, new_scores, projects, whole
from vllm_weir.serve.ask import Ask
from vllm_weir.serve.errors import TYPES, error_body
from vllm_weir.serve.lens import activations_field
from vllm_weir.serve.state import ServerState

DATA = "data: "
DONE = "data: [DONE]"


class Reply:
    """Notes the views of a request's outputs and makes of them what goes out.

    Attributes:
        ask: what the request asks.
        failure: why the engine refused or failed it; known before vLLM has put it into words.
        failed: whether that is none of the client's; up to 0.28 vLLM does not know one from the other.
        several: whether there is more than one choice.
    """

    def __init__(self, ask: Ask, server: ServerState) -> None:
        self.ask = ask
        self.failure: WeirError | None = None
        self.failed = self.several = False
        self._server = server
        self._views: dict[int, View] = {}
        self._sent: dict[int, int] = {}
        self._kept: list[str] = []
        self._lens: dict[str, Any] | None = None

    def note(self, choice: int, view: View | None) -> None:
        """The latest view of a choice."""
        if view is not None:
            self._views[choice] = view
            self.several |= choice > 0

    async def answers(self) -> dict[int, dict[str, Any]]:
        """Choice -> its object; raises WeirError if rows were lost or do not go into the answer."""
        try:
            return await self._server.run(lambda: {i: self._answer(i) for i in sorted(self._views)}, self.discard)
        except WeirError:
            self.discard()
            raise

    @property
    def lens(self) -> dict[str, Any] | None:
        """vllm-lens's field ``activations``, once choice 0 is answered."""
        return self._lens

    async def rewrite(self, chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """The server-sent events of a stream, with what Weir adds."""
        async with aclosing(chunks):
            async for chunk in chunks:
                self._kept.clear()
                try:
                    yield await self._rewritten(chunk)
                except WeirError as e:  # scores on their way were lost: it ends as any stream that fails
                    if (observer := self._server.desk.observer) is not None:
                        observer.failed()
                    yield _event(error_body(500, str(e), e.field or None))
                    yield f"{DONE}\n\n"
                    return
                except BaseException:
                    self.discard()  # nobody will ever know the ids in it
                    raise

    def discard(self) -> None:
        """Free what was put away for chunks or responses that nobody got."""
        for key in self._kept:
            if self._server.spool is not None:
                self._server.spool.delete(key)

    def _answer(self, choice: int) -> dict[str, Any]:
        view = whole(self._views.pop(choice))
        # What vllm-lens's field carries is not sent twice.
        rows = self.ask.own or self.several
        out = answer(view, self._server.inline_bytes(self.ask.inline_bytes), self._keep, rows)
        if self.ask.lens and choice == 0 and not projects(view):
            self._lens = activations_field(view.activations(), self._server.limits.lens_bytes)
        return out

    def _keep(self, acts: Any, size: int) -> dict[str, Any]:
        where = self._server.keep(acts, size)
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


def _event(data: Any) -> str:
    return f"{DATA}{json.dumps(data, ensure_ascii=False, separators=(',', ':'), allow_nan=False)}\n\n"
