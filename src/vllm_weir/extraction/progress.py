"""What a run shows while it goes, and at its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from vllm_weir.extraction.record_loop import RecordCounts
from vllm_weir.extraction.run import Summary
from vllm_weir.storage.stats import _size

SHOWN = 5
"""Reasons that are shown; the file has all."""


class ProgressReporter(Protocol):
    """Is told what was done, and how many records there are."""

    def __call__(self, step: RecordCounts, total: int) -> None: ...


@contextmanager
def bar(quiet: bool) -> Iterator[ProgressReporter]:
    """A progress bar over records, with rows/s, tokens/s and the time left."""
    progress = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"), TimeRemainingColumn(), console=Console(stderr=True),
        transient=True, disable=quiet,
    )  # fmt: skip
    with progress:
        task = progress.add_task("starting the engine", total=None, rate="")
        done, began = RecordCounts(), 0.0

        def report(step: RecordCounts, total: int) -> None:
            nonlocal began
            began = began or time.monotonic()
            done.add(step)
            took = time.monotonic() - began
            rate = f"{done.rows / took:,.0f} rows/s {done.tokens / took:,.0f} tokens/s" if took > 0.5 else ""
            progress.update(task, description="records", completed=done.records, total=total, rate=rate)

        yield report


def show(summary: Summary, console: Console | None = None) -> None:
    """Print what a run did."""
    console = console or Console(highlight=False, soft_wrap=True)
    s = summary
    speed = f", {s.bytes / 1e6 / s.seconds:,.1f} MB/s" if s.requests and s.seconds > 0 else ""
    console.print(
        f"{s.requests:,} of {s.records:,} records: {s.rows:,} rows of {s.tokens:,} tokens, {_size(s.bytes)} in "
        f"{s.seconds:,.1f} s{speed} -> [bold]{escape(s.url)}[/bold]"
    )
    if s.held:
        console.print(f"{s.held:,} records were there already")
    if s.truncated:
        console.print(f"{s.truncated:,} prompts were cut to the length asked for")
    if s.skipped:
        console.print(f"{len(s.skipped):,} records were skipped, listed in skipped.jsonl:")
        for index in sorted(s.skipped)[:SHOWN]:
            console.print(f"  record {index}: {escape(s.skipped[index])}")
        if len(s.skipped) > SHOWN:
            console.print(f"  and {len(s.skipped) - SHOWN:,} more")
    if s.interrupted:
        left = s.records - s.requests - s.held - len(s.skipped)
        console.print(f"[yellow]interrupted[/yellow], {left:,} records are left: the same command goes on")
