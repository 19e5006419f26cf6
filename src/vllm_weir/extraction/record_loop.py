"""`RecordLoop`: reads records of a source with an engine, and writes their rows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol

from vllm_weir.errors import WeirError
from vllm_weir.extraction.engine import ExtractionEngine, PromptRows
from vllm_weir.extraction.run_spec import request_id
from vllm_weir.extraction.source import InputRecord, TextSource
from vllm_weir.schema.row_notes import KEY as ROW_NOTES_KEY
from vllm_weir.storage.object_store import ObjectStore

PIECE_BYTES = 2 << 30
"""Bytes of rows that the engine computes at a time, while as many are being written."""


class RecordWriter(Protocol):
    """The methods of a `Writer` that a run uses."""

    store: ObjectStore

    def holds(self, request_id: str) -> bool:
        """Return whether a request is in the dataset, or finished by this writer."""
        ...

    def write(self, batch: Any) -> None:
        """Add rows of a request."""
        ...

    def finish_request(self, request_id: str, metadata: Mapping[str, Any] | None = None) -> None:
        """Declare a request complete."""
        ...

    def flush(self) -> None:
        """Publish finished requests."""
        ...

    def tidy(self) -> None:
        """Bring what several writers have published into order."""
        ...

    def close(self) -> None:
        """Flush and end."""
        ...

    def __enter__(self) -> RecordWriter: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


@dataclass
class RecordCounts:
    """Counts of what was done.

    Attributes:
        requests, rows, tokens, bytes: Written; bytes of the rows as they are stored.
        held: Records that the dataset already had.
        truncated: Requests whose prompt was cut.
        skipped: Record -> why it was skipped.
    """

    requests: int = 0
    rows: int = 0
    tokens: int = 0
    bytes: int = 0
    held: int = 0
    truncated: int = 0
    skipped: dict[int, str] = field(default_factory=dict)

    def add(self, other: RecordCounts) -> None:
        """Add the counts of `other`."""
        for name in ("requests", "rows", "tokens", "bytes", "held", "truncated"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.skipped |= other.skipped

    @property
    def records(self) -> int:
        """Records that were written, already there or skipped."""
        return self.requests + self.held + len(self.skipped)


@dataclass(frozen=True)
class _Prompt:
    """The tokens of a record; `truncated_from`: how many there were, 0 if none were cut."""

    index: int
    ids: list[int]
    truncated_from: int


class RecordLoop:
    """Reads records with an engine, and writes their rows in a thread while the engine goes on.

    Args:
        source: The records.
        engine: The engine.
        writer: The writer.
        max_length: Prompts are cut to this many tokens; None refuses those over the engine's limit.
        batch: Records that the engine gets at once.
        skip: Skip invalid records and count them, instead of raising.
        flush_seconds: Least time between two publications of finished requests.
        known_skipped: Records that an earlier run skipped, and why.
        row_notes: From `describe_rows`, for rows that are not simply those of all prompt positions.
        reaches: Returns whether a prompt of this many tokens can give a row.
        report: Called after every step with its counts.
        stop: Called between steps; returns whether to end early.

    Raises:
        WeirError: If `max_length` is more than the engine takes.
    """

    def __init__(
        self,
        source: TextSource,
        engine: ExtractionEngine,
        writer: RecordWriter,
        *,
        max_length: int | None = None,
        batch: int = 256,
        skip: bool = False,
        flush_seconds: float = 30.0,
        known_skipped: dict[int, str] | None = None,
        row_notes: dict[str, Any] | None = None,
        reaches: Callable[[int], bool] = lambda tokens: True,
        report: Callable[[RecordCounts], Any] = lambda counts: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        if max_length is not None and max_length > engine.limit:
            raise WeirError(f"the engine takes prompts of up to {engine.limit} tokens", "max_length")
        self.source, self.engine, self.writer = source, engine, writer
        self.max_length, self.batch, self.skip = max_length, batch, skip
        self.flush_seconds, self.known_skipped = flush_seconds, known_skipped or {}
        self.reaches, self.report, self.stop = reaches, report, stop
        self.extra_metadata = {} if row_notes is None else {ROW_NOTES_KEY: [row_notes]}
        self._flushed = time.monotonic()
        self._pending: Future[RecordCounts] | None = None

    def run(self, start: int, stop: int) -> RecordCounts:
        """Process records `start` to `stop` - 1; publish finished requests, also after an error.

        Raises:
            WeirError: For an invalid record (unless `skip`), or rows that cannot be written.
        """
        counts = RecordCounts()
        with ThreadPoolExecutor(1, thread_name_prefix="weir-extract") as pool:
            try:
                self._process(start, stop, counts, pool)
                self._finish_write(counts)
            except BaseException as e:
                self._publish_after_error(counts, e)
                raise
            self.writer.flush()
        return counts

    def _process(self, start: int, stop: int, counts: RecordCounts, pool: ThreadPoolExecutor) -> None:
        # Groups begin at multiples of `batch`, whatever the dataset already has.
        for _, group in itertools.groupby(self.source.read(start, stop), lambda record: record.index // self.batch):
            if self.stop():
                return
            step = RecordCounts()
            prompts = list(self._prompts(list(group), step))
            self._count(counts, step)
            for piece in self._pieces(prompts):
                outputs = self.engine.read([prompt.ids for prompt in piece])
                self._finish_write(counts)
                self._pending = pool.submit(self._write, piece, outputs)
                if self.stop():
                    return

    def _prompts(self, records: list[InputRecord], step: RecordCounts) -> Iterator[_Prompt]:
        """Yield the prompts of records that have to be read; count or refuse the others."""
        to_read = []
        for record in records:
            if self.writer.holds(request_id(self.source, record.index)):
                step.held += 1
            elif self.skip and record.index in self.known_skipped:
                step.skipped[record.index] = self.known_skipped[record.index]
            elif record.value is None:
                self._refuse(record.index, record.reason, step)
            else:
                to_read.append(record)
        limit = self.engine.limit if self.max_length is None else self.max_length
        encoded = self.engine.encode([r.value for r in to_read if r.value])
        for record, ids in zip(to_read, encoded, strict=True):
            if isinstance(ids, WeirError):
                self._refuse(record.index, ids.message, step)
            elif not ids:
                self._refuse(record.index, "it has no tokens", step)
            elif len(ids) > limit and self.max_length is None:
                reason = f"{len(ids)} tokens, the engine takes {limit}; cut it with max_length (--max-length)"
                self._refuse(record.index, reason, step)
            elif not self.reaches(min(len(ids), limit)):
                reason = f"none of the selected positions has a row in a text of {min(len(ids), limit)} tokens"
                self._refuse(record.index, reason, step)
            else:
                yield _Prompt(record.index, ids[:limit], len(ids) if len(ids) > limit else 0)

    def _refuse(self, index: int, reason: str, step: RecordCounts) -> None:
        if not self.skip:
            raise WeirError(f"record {index}: {reason}; correct it, or skip such records (--on-error skip)")
        step.skipped[index] = reason

    def _pieces(self, prompts: list[_Prompt]) -> Iterator[list[_Prompt]]:
        """Split prompts so that the rows of each piece take at most about PIECE_BYTES."""
        piece: list[_Prompt] = []
        piece_bytes = 0
        for prompt in prompts:
            prompt_bytes = len(prompt.ids) * self.engine.row_bytes
            if piece and piece_bytes + prompt_bytes > PIECE_BYTES:
                yield piece
                piece, piece_bytes = [], 0
            piece.append(prompt)
            piece_bytes += prompt_bytes
        if piece:
            yield piece

    def _write(self, piece: list[_Prompt], outputs: list[PromptRows]) -> RecordCounts:
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
        """Wait for the write that is under way."""
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
