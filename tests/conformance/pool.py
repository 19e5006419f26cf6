"""Several architectures at a time, each in a process of its own with a time limit.

They are forked from one that has imported vLLM, because importing it takes longer than most models take to check.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.conformance.engine import set_environment
from tests.conformance.verdict import FAILS, Verdict
from tests.conformance.zoo import Entry

LIMIT = 300.0
"""Seconds for one architecture."""


def run_all(
    entries: Sequence[Entry],
    out: Path,
    jobs: int = 1,
    *,
    limit: float = LIMIT,
    until: float = float("inf"),
    retry: bool = False,
    again: Callable[[Verdict], Entry | None] = lambda verdict: None,
    done: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Run them, `jobs` at a time, and show how far it is.

    Args:
        out: for one JSON and one log per architecture.
        limit: seconds for each.
        until: on the clock of `time.monotonic`: what has not come to an end by then is not waited for.
        retry: also what the zoo says cannot be run.
        again: what to run in the place of a verdict; None to keep it.
        done: told every verdict that is kept, as it comes.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    set_environment()
    out.mkdir(parents=True, exist_ok=True)
    _import_everything()
    waiting, running, verdicts = list(entries), {}, []
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns) as progress:
        task = progress.add_task("", total=len(entries))
        while waiting or running:
            while waiting and len(running) < jobs and time.monotonic() < until:
                entry = waiting.pop(0)
                running[entry.architecture] = (_start(entry, out, retry), time.monotonic())
            progress.update(task, description=" ".join(running))
            time.sleep(0.1)
            over = time.monotonic() >= until
            found = [_finished(name, *at, out, 0.0 if over else limit) for name, at in running.items()]
            if over:
                found += [Verdict(entry.architecture, FAILS, "there was no time left for it") for entry in waiting]
                waiting = []
            for verdict in filter(None, found):
                running.pop(verdict.architecture, None)
                next_try = None if over else again(verdict)
                if next_try is not None:
                    waiting.append(next_try)
                    continue
                verdicts.append(verdict)
                done(verdict)
                progress.advance(task)
                progress.console.print(line(verdict), highlight=False)
    return verdicts


def line(verdict: Verdict) -> str:
    """A verdict in one line."""
    errors = [found[way] for found in verdict.hooks.values() for way in ("capture", "steer") if found[way] is not None]
    worst = f" {max(errors):.1e}" if errors else ""
    return f"{verdict.architecture}: {verdict.verdict}{worst} ({verdict.seconds:.0f} s) {verdict.reason}"


def _import_everything() -> None:
    import torch

    torch.set_num_threads(1)
    import transformers
    import vllm.entrypoints.llm
    import vllm.model_executor.models.registry

    transformers.logging.disable_progress_bar()
    assert vllm.entrypoints.llm


def _start(entry: Entry, out: Path, retry: bool) -> Any:
    import torch

    # A process that has a CUDA context cannot hand it to its children.
    way = "spawn" if torch.cuda.is_initialized() else "fork"
    process = multiprocessing.get_context(way).Process(target=_child, args=(entry, out, retry))
    process.start()
    return process


def _child(entry: Entry, out: Path, retry: bool) -> None:
    # A session of its own: whatever it starts ends with it.
    os.setsid()
    log = os.open(out / f"{entry.architecture}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from tests.conformance.run_one import run_one

    with tempfile.TemporaryDirectory(prefix="weir-zoo-") as scratch:
        where = Path(scratch) / entry.architecture
        run_one(entry, where, retry=retry).save(out / f"{entry.architecture}.json")
    sys.stdout.flush()
    os._exit(0)


def _finished(architecture: str, process: Any, started: float, out: Path, limit: float) -> Verdict | None:
    """The verdict of a process that has ended, or is ended because `limit` is over; None while it runs."""
    seconds = time.monotonic() - started
    late = process.is_alive() and seconds > limit
    if process.is_alive() and not late:
        return None
    if late:
        with contextlib.suppress(ProcessLookupError):  # it may not have got as far as leading a group
            os.killpg(process.pid, 9)
        process.kill()
    process.join()
    written = out / f"{architecture}.json"
    if not late and written.exists() and process.exitcode == 0:
        return Verdict.load(written)
    reason = f"not done after {seconds:.0f} s" if late else f"the process ended with {process.exitcode}"
    return Verdict(architecture, FAILS, reason, seconds=round(seconds, 1))
