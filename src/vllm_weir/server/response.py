"""Weir's part of one HTTP response, in its body or its chunks."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.frontend.outputs.view import OutputView
from vllm_weir.frontend.receive.release import HeldSequences
from vllm_weir.server.errors import TYPES, error_body
from vllm_weir.server.request import WeirRequest
from vllm_weir.server.response_body import NO_LOCK, ROUTED, ValueForm, new_values, projects, weir_object, whole
from vllm_weir.server.state import ServerState

DATA = "data: "
DONE = "data: [DONE]"


class ResponseBuilder:
    """Collects the views of a request's outputs, and builds Weir's part of the response from them.

    Attributes:
        failure: Why the engine refused or failed the request; None if it did not.
        failed: Whether `failure` is the server's, not the client's mistake. vLLM up to 0.28 does
            not distinguish them.
        several: Whether there is more than one choice.
        held: The request's sequences, whose rows are held until the response is out.
        fields: Another system's fields, once choice 0 is answered.
    """

    def __init__(self, request: WeirRequest, server: ServerState) -> None:
        self.request = request
        self.failure: WeirError | None = None
        self.failed = self.several = False
        self.held = HeldSequences()
        self.fields: dict[str, Any] = {}
        self._server = server
        self._views: dict[int, OutputView] = {}
        self._streamed_ends: dict[int, tuple[int, int]] = {}  # choice -> ends of the rows, and of the scores, streamed
        self._value_form = ValueForm(request.binary, server.limits.inline_bytes)
        self._take_back: Callable[[], None] = _nothing  # removes rows that were deposited
        self._spooled: list[str] = []  # ids of the results that this response refers to

    def add_view(self, choice: int, view: OutputView | None) -> None:
        if view is not None:
            self._views[choice] = view
            self.several |= choice > 0

    async def weir_objects(self) -> dict[int, dict[str, Any]]:
        """Return the ``weir`` object of each choice.

        Raise WeirError if rows were lost or do not fit into the response.
        """

        def build() -> dict[int, dict[str, Any]]:
            if self.request.deposit is not None:
                self._deposit()
                return {}
            return {choice: self._weir_object(choice) for choice in sorted(self._views)}

        try:
            if self.request.deposit is None and all(map(_receipt_only, self._views.values())):
                return build()
            return await self._server.run(build, self.discard)
        except WeirError:
            self.discard()
            raise

    async def rewrite(self, chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """Yield a stream's server-sent events with Weir's part added."""
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    self._spooled.clear()
                    try:
                        yield await self._rewrite(chunk)
                    except WeirError as e:  # scores were lost: the stream ends with the error
                        if (observer := self._server.frontend.observer) is not None:
                            observer.failed()
                        yield _event(error_body(500, str(e), e.field or None))
                        yield f"{DONE}\n\n"
                        return
                    except BaseException:
                        self.discard()  # the client does not get the ids in this chunk
                        raise
        finally:
            self.release()

    def release(self) -> None:
        """Free the rows, as the response is out or nobody waits for it."""
        self._views.clear()
        self.held.release()

    def discard(self) -> None:
        """Remove what was kept for a response that nobody gets."""
        self._take_back()
        self._server.forget(list(self._spooled))

    def _weir_object(self, choice: int) -> dict[str, Any]:
        view = whole(self._views.pop(choice))
        # Rows in another system's field are not sent a second time.
        rows = self.request.own or self.several
        # A receipt alone is built in the event loop, which must not wait for a thread.
        cpu_lock = self._server.cpu_lock if view.part.has_rows or view.pending.admitted.calls else NO_LOCK
        inline_bytes = self._server.inline_bytes(self.request.inline_bytes)
        try:
            out = weir_object(view, inline_bytes, self._spool, rows, cpu_lock, self._value_form)
            if self.request.answer is not None and choice == 0 and not projects(view):
                with cpu_lock:
                    self.fields, frames = self.request.answer(view.activations(), self._server.limits)
                self._server.keep_frames(frames, self._spooled)
            if (traced := view.pending.trace) is not None:
                traced.span("delivery")
            return out
        finally:
            view.drop()

    def _spool(self, acts: Any, size: int) -> dict[str, Any]:
        reference = self._server.keep(acts, size, self._spooled)
        self._spooled.append(reference["id"])
        return reference

    def _deposit(self) -> None:
        """Put the rows of choice 0 where another system looks for them."""
        assert self.request.deposit is not None
        view = whole(self._views.pop(0))
        try:
            view.wait()
            self.fields, self._take_back = self.request.deposit(view)
        finally:
            view.drop()

    async def _rewrite(self, chunk: str) -> str:
        if chunk.startswith(DONE):
            return f"{_event(self.fields)}{chunk}" if self.fields and self.request.deposit is None else chunk
        if not chunk.startswith(f"{DATA}{{"):
            return chunk
        data = json.loads(chunk[len(DATA) :])
        if "error" in data:
            if self.failure is not None and self.failure.field:
                data["error"]["param"] = self.request.as_sent(self.failure).field
            if self.failed:
                data["error"] |= {"type": TYPES[500], "code": 500}
            return _event(data)
        if self.request.deposit is not None:
            if not any(choice.get("finish_reason") is not None for choice in data.get("choices", ())):
                return chunk
            await self._server.run(self._deposit, self.discard)
            return _event(data | self.fields)
        changed = [await self._add_weir(choice) for choice in data.get("choices", ())]
        return _event(data) if any(changed) else chunk

    async def _add_weir(self, choice: dict[str, Any]) -> bool:
        """Add ``weir`` to a chunk's choice if it is due, and return whether it was."""
        index = choice["index"]
        view = self._views.get(index)
        if view is None:
            return False
        if choice.get("finish_reason") is not None:
            if _receipt_only(view):
                choice["weir"] = self._final(index)
            else:
                choice["weir"] = await self._server.run(lambda: self._final(index), self.discard)
            if (routed := choice["weir"].pop(ROUTED, None)) is not None:
                choice[ROUTED] = routed
            return True
        if not self.request.stream or not _streams(view):
            return False
        start, scored_start = self._streamed_ends.get(index, (0, 0))
        if view.end <= start and view.scored_end <= scored_start:
            return False
        delta = choice.get("delta") or {}
        if delta.get("role") and not delta.get("content"):
            return False  # a chat's opening chunk; the token of these scores is in a later one
        self._streamed_ends[index] = view.end, view.scored_end
        if _receipt_only(view):  # scores of probes, which are here
            values = new_values(view, start, scored_start, self._value_form)
        else:
            values = await self._server.run(lambda: new_values(view, start, scored_start, self._value_form))
        if values:
            choice["weir"] = values
        return bool(values)

    def _final(self, index: int) -> dict[str, Any]:
        try:
            return self._weir_object(index)
        except WeirError as e:  # the tokens are out already, so the choice carries the error
            self.discard()
            return {"error": str(e)}


def _nothing() -> None:
    pass


def _streams(view: OutputView) -> bool:
    """Return whether a sequence has values that come with its tokens."""
    admitted = view.pending.admitted
    return projects(view) or bool(view.part.read_outs) or admitted.told > 0 or bool(admitted.calls)


def _receipt_only(view: OutputView) -> bool:
    """Return whether a sequence has no rows to wait for, and no values of hooks, so that no thread is needed."""
    return not view.part.has_rows and not view.pending.admitted.calls and view.concluded()


def _event(data: Any) -> str:
    return f"{DATA}{json.dumps(data, ensure_ascii=False, separators=(',', ':'), allow_nan=False)}\n\n"
