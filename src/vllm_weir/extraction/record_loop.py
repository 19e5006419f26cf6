"""Records of a source through one engine into one writer: what every run does, with Ray and without."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.extraction.engine import ExtractionEngine, PromptRows
from vllm_weir.extraction.run_spec import request_id
from vllm_weir.extraction.source import InputRecord, TextSource
from vllm_weir.schema import row_notes
from vllm_weir.storage.layouts.base import Writer

PIECE_BYTES = 2 << 30
"""The rows of so many bytes are under way at once, and as many are being written."""


@dataclass
class RecordCounts:
    """What was done.

    Attributes:
        requests, rows, tokens, bytes: written; bytes of the rows as they are stored.
        held: records that the dataset held already.
        truncated: requests whose prompt was cut.
        skipped: record -> why it was not taken.
    """

    requests: int = 0
    rows: int = 0
    tokens: int = 0
    bytes: int = 0
    held: int = 0
    truncated: int = 0
    skipped: dict[int, str] = field(default_factory=dict)

    def add(self, other: RecordCounts) -> None:
        """Add what another did."""
        for name in ("requests", "rows", "tokens", "bytes", "held", "truncated"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.skipped |= other.skipped

    @property
    def records(self) -> int:
        """Records that are settled."""
        return self.requests + self.held + len(self.skipped)


@dataclass(frozen=True)
class _Prompt:
    index: int
    ids: list[int]
    cut_from: int


class RecordLoop:
    """Takes records to an end.

    Args:
        max_length: prompts are cut to so many tokens; None refuses those over the engine's limit.
        batch: records that the engine gets at once.
        skip: note records that cannot be taken and go on, instead of raising.
        flush_seconds: least time between two moments at which what is finished is published.
        known: records that an earlier run could not take.
        told: of `describe_rows`, for rows that are not simply those of all positions of the prompt.
        reaches: whether a prompt of so many tokens can have a row that is wanted.
        report: is told after every step what it did.
        stop: asked between steps whether to end early.
    """

    def __init__(
        self,
        source: TextSource,
        engine: ExtractionEngine,
        writer: Writer,
        *,
        max_length: int | None = None,
        batch: int = 256,
        skip: bool = False,
        flush_seconds: float = 30.0,
        known: dict[int, str] | None = None,
        told: dict[str, Any] | None = None,
        reaches: Callable[[int], bool] = lambda tokens: True,
        report: Callable[[RecordCounts], Any] = lambda counts: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        if max_length is not None and max_length > engine.limit:
            raise WeirError(f"the engine takes prompts of up to {engine.limit} tokens", "max_length")
        self.source, self.engine, self.writer = source, engine, writer
        self.max_length, self.batch, self.skip = max_length, batch, skip
        self.flush_seconds, self.known, self.report, self.stop = flush_seconds, known or {}, report, stop
        self.reaches = reaches
        self.more = {} if told is None else {row_notes.KEY: [told]}
        self._flushed = time.monotonic()
        self._pending: Future[RecordCounts] | None = None

    def run(self, start: int, stop: int) -> RecordCounts:
        """Take records `start` to `stop` - 1; all that was finished is published at the end, also after an error.

        Raises:
            WeirError: for a record that cannot be taken (unless `skip`), or rows that cannot be written.
        """
        counts = RecordCounts()
        with ThreadPoolExecutor(1, thread_name_prefix="weir-extract") as pool:
            try:
                self._take(start, stop, counts, pool)
                self._settle(counts)
            except BaseException as e:
                self._rescue(counts, e)
                raise
            self.writer.flush()
        return counts

    def _take(self, start: int, stop: int, counts: RecordCounts, pool: ThreadPoolExecutor) -> None:
        # Groups begin at multiples of `batch`, whatever is there already.
        for _, group in itertools.groupby(self.source.read(start, stop), lambda record: record.index // self.batch):
            if self.stop():
                return
            step = RecordCounts()
            prompts = list(self._prompts(list(group), step))
            self._tell(counts, step)
            for piece in self._pieces(prompts):
                readings = self.engine.read([prompt.ids for prompt in piece])
                self._settle(counts)
                self._pending = pool.submit(self._write, piece, readings)
                if self.stop():
                    return

    def _prompts(self, records: list[InputRecord], step: RecordCounts) -> Iterator[_Prompt]:
        wanted = []
        for record in records:
            if self.writer.holds(request_id(self.source, record.index)):
                step.held += 1
            elif self.skip and record.index in self.known:
                step.skipped[record.index] = self.known[record.index]
            elif record.value is None:
                self._refuse(record.index, record.reason, step)
            else:
                wanted.append(record)
        most = self.engine.limit if self.max_length is None else self.max_length
        for record, ids in zip(wanted, self.engine.encode([r.value for r in wanted if r.value]), strict=True):
            if isinstance(ids, WeirError):
                self._refuse(record.index, ids.message, step)
            elif not ids:
                self._refuse(record.index, "it has no tokens", step)
            elif len(ids) > most and self.max_length is None:
                why = f"{len(ids)} tokens, the engine takes {most}; cut it with max_length (--max-length)"
                self._refuse(record.index, why, step)
            elif not self.reaches(min(len(ids), most)):
                why = f"none of the positions that are wanted has a row in a text of {min(len(ids), most)} tokens"
                self._refuse(record.index, why, step)
            else:
                yield _Prompt(record.index, ids[:most], len(ids) if len(ids) > most else 0)

    def _refuse(self, index: int, reason: str, step: RecordCounts) -> None:
        if not self.skip:
            raise WeirError(f"record {index}: {reason}; mend it, or go on without such records (--on-error skip)")
        step.skipped[index] = reason

    def _pieces(self, prompts: list[_Prompt]) -> Iterator[list[_Prompt]]:
        piece: list[_Prompt] = []
        size = 0
        for prompt in prompts:
            bytes_ = len(prompt.ids) * self.engine.row_bytes
            if piece and size + bytes_ > PIECE_BYTES:
                yield piece
                piece, size = [], 0
            piece.append(prompt)
            size += bytes_
        if piece:
            yield piece

    def _write(self, piece: list[_Prompt], readings: list[PromptRows]) -> RecordCounts:
        step = RecordCounts()
        for prompt, reading in zip(piece, readings, strict=True):
            name = request_id(self.source, prompt.index)
            for rows in reading.rows:
                self.writer.write(replace(rows, request_id=name))
                step.rows += len(rows.rows)
                step.bytes += rows.rows.nbytes
            metadata = {
                "record": prompt.index,
                "prompt_tokens": reading.prompt_tokens,
                "generated_tokens": reading.generated_tokens,
                "finish_reason": reading.finish_reason,
                **self.more,
            }
            if prompt.cut_from:
                metadata["truncated_from"] = prompt.cut_from
                step.truncated += 1
            self.writer.finish_request(name, metadata)
            step.requests += 1
            step.tokens += reading.prompt_tokens + reading.generated_tokens - 1
        if time.monotonic() - self._flushed >= self.flush_seconds:
            self.writer.flush()
            self._flushed = time.monotonic()
        return step

    def _settle(self, counts: RecordCounts) -> None:
        """Wait for what is being written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._tell(counts, pending.result())

    def _tell(self, counts: RecordCounts, step: RecordCounts) -> None:
        counts.add(step)
        self.report(step)

    def _rescue(self, counts: RecordCounts, error: BaseException) -> None:
        """Publish what was finished before an error."""
        try:
            self._settle(counts)
            self.writer.flush()
        except WeirError as e:
            error.add_note(f"and what was finished could not be published: {e}")
