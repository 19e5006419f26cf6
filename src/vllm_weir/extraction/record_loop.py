"""`RecordLoop`: reads and encodes records of a source, runs them on an engine, and writes their rows."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vllm_weir.errors import WeirError
from vllm_weir.extraction.engine import PIECE_BYTES, PIECES_AHEAD, ExtractionEngine, PromptRows, ReadAheadEngine
from vllm_weir.extraction.feature_writer import FeatureWriter
from vllm_weir.extraction.run_spec import RecordCounts, request_id
from vllm_weir.extraction.source import InputRecord, TextSource
from vllm_weir.schema.capture import ROW_NOTES_KEY
from vllm_weir.storage.layouts.base import Writer


@dataclass(frozen=True)
class Prompt:
    """The tokens of a record; `truncated_from`: how many there were, 0 if none were cut."""

    index: int
    ids: list[int]
    truncated_from: int


class PromptGroup(NamedTuple):
    """The prompts of a group of records that have to be read, and the counts of the others."""

    prompts: list[Prompt]
    counts: RecordCounts


class PromptReader:
    """Reads and encodes records.

    Args:
        engine: Encodes them.
        holds: Returns whether the dataset has a request.
        max_length: Prompts are cut to this many tokens; None refuses those over the engine's limit.
        batch: Records of a group.
        skip: Skip invalid records and count them, instead of raising.
        known_skipped: Records that an earlier run skipped, and why.
        reaches: Returns whether a prompt of this many tokens can give a row.
    """

    def __init__(
        self,
        source: TextSource,
        engine: ExtractionEngine,
        holds: Callable[[str], bool],
        *,
        max_length: int | None,
        batch: int,
        skip: bool,
        known_skipped: Mapping[int, str],
        reaches: Callable[[int], bool],
    ) -> None:
        if max_length is not None and max_length > engine.limit:
            raise WeirError(f"the engine takes prompts of up to {engine.limit} tokens", "max_length")
        self.source, self.engine, self.holds = source, engine, holds
        self.max_length, self.batch, self.skip = max_length, batch, skip
        self.known_skipped, self.reaches = known_skipped, reaches

    def groups(self, start: int, stop: int) -> Iterator[PromptGroup]:
        """Yield the groups of records `start` to `stop` - 1; raise WeirError for an invalid record (unless `skip`).

        Groups begin at multiples of `batch`, whatever the dataset already has.
        """
        for _, group in itertools.groupby(self.source.read(start, stop), lambda record: record.index // self.batch):
            counts = RecordCounts()
            yield PromptGroup(list(self._prompts(list(group), counts)), counts)

    def _prompts(self, records: list[InputRecord], counts: RecordCounts) -> Iterator[Prompt]:
        """Yield the prompts of records that have to be read; count or refuse the others."""
        to_read = []
        for record in records:
            if self.holds(request_id(self.source, record.index)):
                counts.held += 1
            elif self.skip and record.index in self.known_skipped:
                counts.skipped[record.index] = self.known_skipped[record.index]
            elif record.value is None:
                self._refuse(record.index, record.reason, counts)
            else:
                to_read.append(record)
        limit = self.engine.limit if self.max_length is None else self.max_length
        encoded = self.engine.encode([r.value for r in to_read if r.value])
        for record, ids in zip(to_read, encoded, strict=True):
            if isinstance(ids, WeirError):
                self._refuse(record.index, ids.message, counts)
            elif not ids:
                self._refuse(record.index, "it has no tokens", counts)
            elif len(ids) > limit and self.max_length is None:
                reason = f"{len(ids)} tokens, the engine takes {limit}; cut it with max_length (--max-length)"
                self._refuse(record.index, reason, counts)
            elif not self.reaches(min(len(ids), limit)):
                reason = f"none of the selected positions has a row in a text of {min(len(ids), limit)} tokens"
                self._refuse(record.index, reason, counts)
            else:
                yield Prompt(record.index, ids[:limit], len(ids) if len(ids) > limit else 0)

    def _refuse(self, index: int, reason: str, counts: RecordCounts) -> None:
        if not self.skip:
            raise WeirError(f"record {index}: {reason}; correct it, or skip such records (--on-error skip)")
        counts.skipped[index] = reason


RecordWriter = Writer | FeatureWriter


class RecordLoop:
    """Reads records with an engine, and writes their rows in a thread while the engine goes on.

    Another thread encodes the records that come next. An engine that reads ahead gets pieces of a
    batch, and further ones before it has done the first.

    Args:
        flush_seconds: Least time between two publications of finished requests.
        row_notes: From `describe_rows`, for rows that are not simply those of all prompt positions.
        report: Called after every step with its counts.
        stop: Called between steps; returns whether to end early.
    """

    def __init__(
        self,
        reader: PromptReader,
        writer: RecordWriter,
        *,
        flush_seconds: float = 30.0,
        row_notes: dict[str, Any] | None = None,
        report: Callable[[RecordCounts], Any] = lambda counts: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.reader, self.source, self.engine, self.writer = reader, reader.source, reader.engine, writer
        self.flush_seconds, self.report, self.stop = flush_seconds, report, stop
        self.extra_metadata = {} if row_notes is None else {ROW_NOTES_KEY: [row_notes]}
        self._flushed = time.monotonic()
        self._pending: Future[RecordCounts] | None = None

    def run(self, start: int, stop: int) -> RecordCounts:
        """Process records `start` to `stop` - 1; publish finished requests, also after an error."""
        counts = RecordCounts()
        with (
            ThreadPoolExecutor(1, thread_name_prefix="weir-extract") as writing,
            ThreadPoolExecutor(1, thread_name_prefix="weir-encode") as encoding,
        ):
            try:
                self._process(self._pieces(start, stop, counts, encoding), counts, writing)
                self._finish_write(counts)
            except BaseException as e:
                self._publish_after_error(counts, e)
                raise
            self.writer.flush()
        return counts

    def _process(self, pieces: Iterator[list[Prompt]], counts: RecordCounts, writing: ThreadPoolExecutor) -> None:
        given: deque[list[Prompt]] = deque()
        refusals: list[WeirError] = []

        def prompts() -> Iterator[list[list[int]]]:
            try:
                for piece in pieces:
                    given.append(piece)
                    yield [prompt.ids for prompt in piece]
            except WeirError as e:  # raised below, once the engine has done what came before
                refusals.append(e)

        with contextlib.closing(self._read(prompts())) as read:
            for outputs in read:
                self._finish_write(counts)
                self._pending = writing.submit(self._write, given.popleft(), outputs)
        if refusals:
            raise refusals[0]

    def _pieces(
        self, start: int, stop: int, counts: RecordCounts, encoding: ThreadPoolExecutor
    ) -> Iterator[list[Prompt]]:
        """Yield the prompts of each piece; those of the next group are encoded meanwhile."""
        groups = self.reader.groups(start, stop)
        ahead = encoding.submit(next, groups, None)
        while not self.stop() and (group := ahead.result()) is not None:
            ahead = encoding.submit(next, groups, None)
            self._count(counts, group.counts)
            for piece in self._cut(group.prompts):
                yield piece
                if self.stop():
                    return

    def _cut(self, prompts: list[Prompt]) -> Iterator[list[Prompt]]:
        """Split prompts so that the rows of all pieces under way take at most about PIECE_BYTES."""
        at_once = PIECES_AHEAD if isinstance(self.engine, ReadAheadEngine) else 1
        most_bytes, most_prompts = PIECE_BYTES // at_once, max(1, self.reader.batch // at_once)
        piece: list[Prompt] = []
        piece_bytes = 0
        for prompt in prompts:
            prompt_bytes = len(prompt.ids) * self.engine.row_bytes
            if piece and (piece_bytes + prompt_bytes > most_bytes or len(piece) == most_prompts):
                yield piece
                piece, piece_bytes = [], 0
            piece.append(prompt)
            piece_bytes += prompt_bytes
        if piece:
            yield piece

    def _read(self, pieces: Iterator[list[list[int]]]) -> Generator[list[PromptRows], None, None]:
        if isinstance(self.engine, ReadAheadEngine):
            yield from self.engine.read_ahead(pieces)
        else:
            for piece in pieces:
                yield self.engine.read(piece)

    def _write(self, piece: list[Prompt], outputs: list[PromptRows]) -> RecordCounts:
        step = RecordCounts()
        for prompt, output in zip(piece, outputs, strict=True):
            name = request_id(self.source, prompt.index)
            for rows in output.rows:
                self.writer.write(replace(rows, request_id=name))
                step.rows += rows.row_count
                step.bytes += rows.nbytes
            metadata = {
                "record": prompt.index,
                "prompt_tokens": output.prompt_tokens,
                "generated_tokens": output.generated_tokens,
                "finish_reason": output.finish_reason,
                **self.extra_metadata,
            }
            if prompt.truncated_from:
                metadata["truncated_from"] = prompt.truncated_from
                step.truncated += 1
            self.writer.finish_request(name, metadata)
            step.requests += 1
            step.tokens += output.prompt_tokens + output.generated_tokens - 1
        if time.monotonic() - self._flushed >= self.flush_seconds:
            self.writer.flush()
            self._flushed = time.monotonic()
        return step

    def _finish_write(self, counts: RecordCounts) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._count(counts, pending.result())

    def _count(self, counts: RecordCounts, step: RecordCounts) -> None:
        counts.add(step)
        self.report(step)

    def _publish_after_error(self, counts: RecordCounts, error: BaseException) -> None:
        """Publish what was finished before `error`, and add a note to it if that fails."""
        try:
            self._finish_write(counts)
            self.writer.flush()
        except WeirError as e:
            error.add_note(f"finished requests could not be published either: {e}")
