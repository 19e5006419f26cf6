"""`PromptReader`: the prompts of a run's records, group by group."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from vllm_weir.errors import WeirError
from vllm_weir.extraction.counts import RecordCounts
from vllm_weir.extraction.engine import ExtractionEngine
from vllm_weir.extraction.run_spec import request_id
from vllm_weir.extraction.source import InputRecord, TextSource


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

    Raises:
        WeirError: If `max_length` is more than the engine takes.
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
