"""`RecordLoop`: reads records of a source with an engine, and writes their rows."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.extraction.counts import RecordCounts
from vllm_weir.extraction.engine import PIECE_BYTES, PIECES_AHEAD, PromptRows, ReadAheadEngine
from vllm_weir.extraction.feature_writer import FeatureWriter
from vllm_weir.extraction.prompt_reader import Prompt, PromptReader
from vllm_weir.extraction.run_spec import request_id
from vllm_weir.schema.row_notes import KEY as ROW_NOTES_KEY
from vllm_weir.storage.layouts.base import Writer

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
