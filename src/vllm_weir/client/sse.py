"""Server-sent events: from bytes to chunks, and from chunks to the whole completion."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from vllm_weir.client.errors import ServerError, error_from
from vllm_weir.client.response_fields import features_of, hook_values_of, lens_of, probe_scores_of, projected_of
from vllm_weir.client.results import Choice, Chunk, Completion, add_weir_fields, raw_type, weir_missing
from vllm_weir.errors import WeirError
from vllm_weir.results.activations import Activations
from vllm_weir.results.read_outs import FeatureValues, LensReadings, LensTokens, by_block, each_lens, nested
from vllm_weir.results.scores import Scores
from vllm_weir.schema.hooks import Site

SomeScores = TypeVar("SomeScores", bound=Scores)
DONE = "[DONE]"


class EventParser:
    """Splits a stream of bytes into the data of server-sent events."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._data: list[str] = []

    def feed(self, data: bytes) -> Iterator[str]:
        """Yield the data of the events that these bytes complete."""
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
    """Turns a stream's events into chunks, and all of them into one completion.

    Args:
        chat: Whether the events are of ``/v1/chat/completions``.
        asks_weir: Whether the request asks something of Weir.
    """

    def __init__(self, chat: bool, asks_weir: bool = False) -> None:
        self._chat, self._asks_weir = chat, asks_weir
        self._choices: dict[int, Choice] = {}
        self._completion = Completion([])
        self._score_counts: dict[int, dict[Site, int]] = {}
        self._row_counts: dict[int, dict[tuple[Any, ...], int]] = {}
        self._failure: WeirError | None = None
        self.done = False

    def add(self, event: str) -> Iterator[Chunk]:
        """Yield the chunks of one event; raise the error that it reports."""
        if event == DONE:
            self.done = True
            return
        try:
            data = json.loads(event)
        except (ValueError, RecursionError):
            raise ServerError(f"the server sent an event that is not JSON: {event[:80]!r}") from None
        if "error" in data:
            code = data["error"].get("code") if isinstance(data["error"], dict) else None
            raise error_from(code if isinstance(code, int) else 500, data)
        completion = self._completion
        completion.id = data.get("id", completion.id)
        completion.model = data.get("model", completion.model)
        completion.usage = data.get("usage") or completion.usage
        completion.prompt_token_ids = data.get("prompt_token_ids") or completion.prompt_token_ids
        raw = raw_type(self._chat, True).construct(**data)
        for data_choice in data.get("choices", ()):
            yield self._chunk(data_choice, raw)

    def _chunk(self, data: dict[str, Any], raw: Any) -> Chunk:
        """Add one choice of an event, and return it as a chunk."""
        choice = self._choices.setdefault(data["index"], Choice(data["index"]))
        delta = data.get("delta") or {}
        chunk = Chunk(
            index=choice.index,
            text=(delta.get("content") if self._chat else data.get("text")) or "",
            token_ids=data.get("token_ids") or [],
            finish_reason=data.get("finish_reason"),
            stop_reason=data.get("stop_reason"),
            raw=raw,
        )
        choice.text += chunk.text
        if data.get("token_ids") is not None:
            choice.token_ids = (choice.token_ids or []) + chunk.token_ids
        choice.finish_reason = chunk.finish_reason or choice.finish_reason
        choice.stop_reason = choice.stop_reason if chunk.stop_reason is None else chunk.stop_reason
        for call in delta.get("tool_calls") or ():
            choice.tool_calls = _merge_tool_call(choice.tool_calls or [], call)
        self._completion.prompt_token_ids = data.get("prompt_token_ids") or self._completion.prompt_token_ids
        if chunk.finish_reason is not None:
            self._finish(choice, chunk, data)
        elif data.get("weir") is not None:
            self._add_values(choice, chunk, data["weir"])
        return chunk

    def _add_values(self, choice: Choice, chunk: Chunk, weir: dict[str, Any]) -> None:
        """Add the values that came with a token."""
        scores = weir.get("scores") or {}
        if "sites" in scores:
            chunk.projected = projected_of(scores)
            counts = self._score_counts.setdefault(choice.index, {})
            for site in chunk.projected:
                counts[site] = counts.get(site, 0) + chunk.projected.count(site)
        chunk.probe_scores = probe_scores_of(scores)
        chunk.features, chunk.lens = features_of(weir.get("features") or {}), lens_of(weir.get("lens") or {})
        chunk.values = hook_values_of(weir.get("values") or {})
        rows = self._row_counts.setdefault(choice.index, {})
        for kind, found in (("probe", chunk.probe_scores), ("values", chunk.values)):
            for name, values in (found or {}).items():
                rows[kind, name] = rows.get((kind, name), 0) + len(values)
        for block, features in by_block(chunk.features).items():
            rows[block] = rows.get(block, 0) + len(features)
        for label, lens in each_lens(chunk.lens).items():
            for layer, tokens in lens.items():
                rows["lens", label, layer] = rows.get(("lens", label, layer), 0) + len(tokens)

    def _finish(self, choice: Choice, chunk: Chunk, data: dict[str, Any]) -> None:
        """Add the ``weir`` object of a choice's last event, which repeats all its scores."""
        if data.get("weir") is None:
            if self._asks_weir:
                self._failure = weir_missing()
            return
        try:
            add_weir_fields(choice, data)
        except WeirError as e:
            self._failure = e
        if choice.projected is not None:
            chunk.projected = _skip_rows(choice.projected, self._score_counts.get(choice.index, {}))
        seen = self._row_counts.get(choice.index, {})
        chunk.probe_scores = _skip_scores(choice.probe_scores, seen, "probe")
        chunk.values = _skip_scores(choice.hook_values, seen, "values")
        later = {
            block: FeatureValues(one.positions[n:], one.ids[n:], one.values[n:])
            for block, one in by_block(choice.features).items()
            if (n := seen.get(block, 0)) < len(one)
        }
        chunk.features = nested(later)
        late = {label: _skip_lens(lens, label, seen) for label, lens in each_lens(choice.lens).items()}
        late = {label: lens for label, lens in late.items() if lens}
        chunk.lens = late.get("", LensReadings()) if isinstance(choice.lens, LensReadings) else late

    def result(self) -> Completion:
        """Return the whole completion.

        Raises:
            WeirError: If the server could not do what was asked.
            ServerError: If the stream ended early.
        """
        if self._failure is not None:
            raise self._failure
        unfinished = [c.index for c in self._choices.values() if c.finish_reason is None]
        if not self._choices or (unfinished and not self.done):
            raise ServerError("the stream ended before the response was complete")
        self._completion.choices = [self._choices[k] for k in sorted(self._choices)]
        return self._completion


def _skip_scores(scores: SomeScores | None, seen: Mapping[Any, int], kind: str) -> SomeScores | None:
    """Return `scores` without the first ``seen[kind, name]`` rows of each name; None if none are left."""
    if scores is None:
        return None
    left = {name: n for name in scores if (n := seen.get((kind, name), 0)) < len(scores[name])}
    values = {name: scores[name][n:] for name, n in left.items()}
    return type(scores)(values, {name: scores.positions[name][n:] for name, n in left.items()}) if left else None


def _skip_lens(lens: LensReadings, label: str, seen: Mapping[Any, int]) -> LensReadings:
    """Return `lens` without the first ``seen["lens", label, layer]`` rows of each block that has more."""
    return LensReadings(
        (layer, LensTokens(one.positions[n:], one.token_ids[n:], one.logprobs[n:]))
        for layer, one in lens.items()
        if (n := seen.get(("lens", label, layer), 0)) < len(one)
    )


def _skip_rows(scores: Activations, counts: dict[Site, int]) -> Activations:
    """Return `scores` without the first ``counts[site]`` rows of each site."""
    starts = {site: counts.get(site, 0) for site in scores}
    return Activations(
        {site: scores[site][start:] for site, start in starts.items()},
        {site: scores.positions_of(*site)[start:] for site, start in starts.items()},
        {site: scores.token_ids_of(*site)[start:] for site, start in starts.items()},
    )


def _merge_tool_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> list[dict[str, Any]]:
    """Return `calls` with `delta` appended to the call that it continues, or as a new call."""
    index = delta.get("index", 0)
    current = next((call for call in calls if call.get("index", 0) == index), None)
    if current is None:
        return [*calls, delta]
    function, function_delta = dict(current.get("function") or {}), delta.get("function") or {}
    function |= {name: value for name, value in function_delta.items() if name != "arguments" and value}
    function["arguments"] = (function.get("arguments") or "") + (function_delta.get("arguments") or "")
    changed = {name: value for name, value in delta.items() if value and name != "function"}
    merged = current | changed | {"function": function}
    return [merged if call is current else call for call in calls]
