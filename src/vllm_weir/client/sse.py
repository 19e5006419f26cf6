"""Server-sent events: from bytes to chunks, and from chunks to the whole answer."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any

from vllm_weir.client.errors import ServerError, error_of
from vllm_weir.client.results import Choice, Chunk, Completion, raw_type, scores_of, take_weir, unheeded
from vllm_weir.errors import WeirError
from vllm_weir.results.activations import Activations
from vllm_weir.schema.hooks import Site

DONE = "[DONE]"


class EventParser:
    """Cuts bytes, however they come, into the data of server-sent events."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._data: list[str] = []

    def feed(self, data: bytes) -> Iterator[str]:
        """The events that these bytes complete."""
        *lines, self._text = (self._text + self._decoder.decode(data)).split("\n")
        for line in lines:
            line = line.removesuffix("\r")
            if not line:
                if self._data:
                    yield "\n".join(self._data)
                self._data = []
            elif line.startswith("data:"):
                self._data.append(line[5:].removeprefix(" "))


class StreamAssembler:
    """Puts a stream's chunks together.

    Args:
        asked: whether the request asked something of Weir.
    """

    def __init__(self, chat: bool, asked: bool = False) -> None:
        self._chat, self._asked = chat, asked
        self._choices: dict[int, Choice] = {}
        self._whole = Completion([])
        self._seen: dict[int, dict[Site, int]] = {}
        self._failure: WeirError | None = None
        self.done = False

    def take(self, event: str) -> Iterator[Chunk]:
        """The chunks of one event; raises the error that it tells of."""
        if event == DONE:
            self.done = True
            return
        try:
            data = json.loads(event)
        except (ValueError, RecursionError):
            raise ServerError(f"the server sent an event that is no JSON: {event[:80]!r}") from None
        if "error" in data:
            code = data["error"].get("code") if isinstance(data["error"], dict) else None
            raise error_of(code if isinstance(code, int) else 500, data)
        whole = self._whole
        whole.id, whole.model = data.get("id", whole.id), data.get("model", whole.model)
        whole.usage = data.get("usage") or whole.usage
        whole.prompt_token_ids = data.get("prompt_token_ids") or whole.prompt_token_ids
        raw = raw_type(self._chat, True).construct(**data)
        for part in data.get("choices", ()):
            yield self._part(part, raw)

    def _part(self, part: dict[str, Any], raw: Any) -> Chunk:
        choice = self._choices.setdefault(part["index"], Choice(part["index"]))
        delta = part.get("delta") or {}
        chunk = Chunk(
            index=choice.index,
            text=(delta.get("content") if self._chat else part.get("text")) or "",
            token_ids=part.get("token_ids") or [],
            finish_reason=part.get("finish_reason"),
            raw=raw,
        )
        choice.text += chunk.text
        if part.get("token_ids") is not None:
            choice.token_ids = (choice.token_ids or []) + chunk.token_ids
        choice.finish_reason = chunk.finish_reason or choice.finish_reason
        for call in delta.get("tool_calls") or ():
            choice.tool_calls = _merged(choice.tool_calls or [], call)
        self._whole.prompt_token_ids = part.get("prompt_token_ids") or self._whole.prompt_token_ids
        weir = part.get("weir")
        if weir is not None and chunk.finish_reason is not None:
            try:
                take_weir(choice, weir)  # the whole of it, as if there were no stream
            except WeirError as e:
                self._failure = e
            if choice.scores is not None:
                chunk.scores = _later(choice.scores, self._seen.get(choice.index, {}))
        elif self._asked and chunk.finish_reason is not None:
            self._failure = unheeded()
        elif weir is not None and weir.get("scores") is not None:
            chunk.scores = scores_of(weir["scores"])
            seen = self._seen.setdefault(choice.index, {})
            for site in chunk.scores:
                seen[site] = seen.get(site, 0) + chunk.scores.count(site)
        return chunk

    def result(self) -> Completion:
        """The whole answer.

        Raises:
            WeirError: if the server could not do what was asked.
            ServerError: if the stream ended before the answer was complete.
        """
        if self._failure is not None:
            raise self._failure
        unfinished = [c.index for c in self._choices.values() if c.finish_reason is None]
        if not self._choices or (unfinished and not self.done):
            raise ServerError("the stream ended before the answer was complete")
        self._whole.choices = [self._choices[k] for k in sorted(self._choices)]
        return self._whole


def _later(scores: Activations, seen: dict[Site, int]) -> Activations:
    """The rows after the first `seen` ones of each site."""
    from_ = {site: seen.get(site, 0) for site in scores}
    return Activations(
        {site: scores[site][n:] for site, n in from_.items()},
        {site: scores.positions_of(*site)[n:] for site, n in from_.items()},
        {site: scores.token_ids_of(*site)[n:] for site, n in from_.items()},
    )


def _merged(calls: list[dict[str, Any]], delta: dict[str, Any]) -> list[dict[str, Any]]:
    """Tool calls with a delta of one of them taken in."""
    index = delta.get("index", 0)
    known = next((c for c in calls if c.get("index", 0) == index), None)
    if known is None:
        return [*calls, delta]
    function, new = dict(known.get("function") or {}), delta.get("function") or {}
    function |= {k: v for k, v in new.items() if k != "arguments" and v}
    function["arguments"] = (function.get("arguments") or "") + (new.get("arguments") or "")
    merged = known | {k: v for k, v in delta.items() if v and k != "function"} | {"function": function}
    return [merged if c is known else c for c in calls]
