"""What a run prints: a progress bar, and a summary at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.markup import escape

from vllm_weir.extraction.counts import RecordCounts
from vllm_weir.extraction.run import Summary
from vllm_weir.storage.cli import progress_bar
from vllm_weir.storage.stats import readable_size

MAX_SHOWN = 5
"""Skipped records whose reasons are printed; skipped.jsonl has all."""


class ProgressReporter(Protocol):
    """A callable that is told what a step did, and how many records there are."""

    def __call__(self, step: RecordCounts, total: int) -> None:
        """Report the counts of a step."""
        ...


@contextmanager
def progress_reporter(quiet: bool) -> Iterator[ProgressReporter]:
    """Show a progress bar with rows/s, tokens/s and the time left; yield its reporter."""
    with progress_bar(quiet) as progress:
        task = progress.add_task("starting the engine", total=None, rate="")
        done, start = RecordCounts(), 0.0

        def report(step: RecordCounts, total: int) -> None:
            nonlocal start
            start = start or time.monotonic()
            done.add(step)
            elapsed = time.monotonic() - start
            rate = f"{done.rows / elapsed:,.0f} rows/s {done.tokens / elapsed:,.0f} tokens/s" if elapsed > 0.5 else ""
            progress.update(task, description="records", completed=done.records, total=total, rate=rate)

        yield report


def show(summary: Summary, console: Console | None = None) -> None:
    """Print the summary of a run."""
    console = console or Console(highlight=False, soft_wrap=True)
    s = summary
    speed = f", {s.bytes / 1e6 / s.seconds:,.1f} MB/s" if s.requests and s.seconds > 0 else ""
    console.print(
        f"{s.requests:,} of {s.records:,} records: {s.rows:,} rows of {s.tokens:,} tokens, {readable_size(s.bytes)} in "
        f"{s.seconds:,.1f} s{speed} -> [bold]{escape(s.url)}[/bold]"
    )
    if s.held:
        console.print(f"{s.held:,} records were there already")
    if s.truncated:
        console.print(f"{s.truncated:,} prompts were cut to the length asked for")
    if s.skipped:
        console.print(f"{len(s.skipped):,} records were skipped, listed in skipped.jsonl:")
        for index in sorted(s.skipped)[:MAX_SHOWN]:
            console.print(f"  record {index}: {escape(s.skipped[index])}")
        if len(s.skipped) > MAX_SHOWN:
            console.print(f"  and {len(s.skipped) - MAX_SHOWN:,} more")
    if s.interrupted:
        left = s.records - s.requests - s.held - len(s.skipped)
        console.print(f"[yellow]interrupted[/yellow], {left:,} records are left: the same command goes on")
