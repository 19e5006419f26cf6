"""`RecordCounts`: what a run, or a step of it, did."""

from __future__ import annotations

from dataclasses import dataclass, field


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
        for name in ("requests", "rows", "tokens", "bytes", "held", "truncated"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.skipped |= other.skipped

    @property
    def records(self) -> int:
        return self.requests + self.held + len(self.skipped)
