"""Several architectures at a time, each in a process of its own with a time limit.

They are forked from one that has imported vLLM, because importing it takes longer than most models take to check. One
that dies of a signal is run once more without Weir: if stock vLLM dies by itself, it cannot be run.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.conformance.engine import device_name, set_environment
from tests.conformance.verdict import CANNOT, FAILS, Verdict
from tests.conformance.zoo import Entry
from tests.support.zygote import inspect_models_here, keep_frozen, replace_kernels

LIMIT = 300.0
"""Seconds for one architecture."""


@dataclass
class _Run:
    """A process at work; `died`: the verdict on the one before it, which died, while this one runs without Weir."""

    entry: Entry
    process: Any
    started: float
    died: Verdict | None = None


def run_all(
    entries: Sequence[Entry],
    out: Path,
    jobs: int = 1,
    *,
    limit: float = LIMIT,
    until: float = float("inf"),
    retry: bool = False,
    lens: bool = False,
    again: Callable[[Verdict], Entry | None] = lambda verdict: None,
    done: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Run them, `jobs` at a time, and show how far it is.

    Args:
        out: for one JSON and one log per architecture.
        limit: seconds for each.
        until: on the clock of `time.monotonic`: what has not come to an end by then is not waited for.
        retry: also what the zoo says cannot be run.
        lens: check the lens alone.
        again: what to run in the place of a verdict; None to keep it.
        done: told every verdict that is kept, as it comes.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    set_environment()
    out.mkdir(parents=True, exist_ok=True)
    _import_everything()
    waiting, verdicts = list(entries), []
    running: dict[str, _Run] = {}
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns) as progress:
        task = progress.add_task("", total=len(entries))
        while waiting or running:
            while waiting and len(running) < jobs and time.monotonic() < until:
                entry = waiting.pop(0)
                running[entry.name] = _Run(entry, _start(entry, out, retry, lens), time.monotonic())
            progress.update(task, description=" ".join(running))
            time.sleep(0.1)
            over = time.monotonic() >= until
            found = [_finished(run, out, 0.0 if over else limit) for run in running.values()]
            if over:
                found += [Verdict(entry.name, FAILS, "there was no time left for it") for entry in waiting]
                waiting = []
            for verdict in filter(None, found):
                run = running.pop(verdict.architecture, None)
                if run is not None and run.died is None and _died(run) and not over:
                    alone = _start(run.entry, out, retry, lens, alone=True)
                    running[verdict.architecture] = _Run(run.entry, alone, time.monotonic(), verdict)
                    continue
                next_try = None if over else again(verdict)
                if next_try is not None:
                    waiting.append(next_try)
                    continue
                verdicts.append(verdict)
                done(verdict)
                progress.advance(task)
                progress.console.print(line(verdict), highlight=False, emoji=False)
    gc.unfreeze()
    return verdicts


def line(verdict: Verdict) -> str:
    """A verdict in one line."""
    errors = [found[way] for found in verdict.hooks.values() for way in ("capture", "steer") if found[way] is not None]
    errors += [verdict.lens["error"]] if verdict.lens.get("error") is not None else []
    worst = f" {max(errors):.1e}" if errors else ""
    return f"{verdict.architecture}: {verdict.verdict}{worst} ({verdict.seconds:.0f} s) {verdict.reason}"


def _import_everything() -> None:
    import torch

    torch.set_num_threads(1)
    import transformers
    import vllm.entrypoints.llm
    import vllm.model_executor.models.registry

    if device_name() == "cpu":
        import vllm.v1.worker.cpu_worker

        replace_kernels()
        inspect_models_here()
    transformers.logging.disable_progress_bar()
    assert vllm.entrypoints.llm
    gc.collect()
    gc.freeze()  # what is imported stays: no child's collections need look at it


def _start(entry: Entry, out: Path, retry: bool, lens: bool, alone: bool = False) -> Any:
    import torch

    # A process that has a CUDA context cannot hand it to its children.
    way = "spawn" if torch.cuda.is_initialized() else "fork"
    process = multiprocessing.get_context(way).Process(target=_child, args=(entry, out, retry, lens, alone))
    process.start()
    return process


def _child(entry: Entry, out: Path, retry: bool, lens: bool, alone: bool) -> None:
    # A session of its own: whatever it starts ends with it.
    os.setsid()
    keep_frozen()
    name = f"{entry.name}.alone" if alone else entry.name
    log = os.open(out / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from tests.conformance.run_one import run_one, run_stock

    with tempfile.TemporaryDirectory(prefix="weir-zoo-") as scratch:
        where = Path(scratch) / entry.name
        if alone:
            run_stock(entry, where)
        else:
            run_one(entry, where, retry=retry, lens=lens).save(out / f"{entry.name}.json")
    sys.stdout.flush()
    os._exit(0)


def _died(run: _Run) -> bool:
    # By a signal, and not by one that whoever is short of time or memory sends.
    return run.process.exitcode < 0 and run.process.exitcode != -signal.SIGKILL


def _finished(run: _Run, out: Path, limit: float) -> Verdict | None:
    """The verdict of a process that has ended, or is ended because `limit` is over; None while it runs."""
    process, architecture, seconds = run.process, run.entry.name, time.monotonic() - run.started
    late = process.is_alive() and seconds > limit
    if process.is_alive() and not late:
        return None
    if late:
        with contextlib.suppress(ProcessLookupError):  # it may not have got as far as leading a group
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.join()
    if run.died is not None:
        if late or process.exitcode == 0:
            return run.died
        return replace(run.died, verdict=CANNOT, reason=f"{run.died.reason}, and so it does with stock vLLM alone")
    written = out / f"{architecture}.json"
    if not late and written.exists() and process.exitcode == 0:
        return Verdict.load(written)
    reason = f"not done after {seconds:.0f} s" if late else f"the process ended with {process.exitcode}"
    import vllm

    here = {"vllm": vllm.__version__, "backend": device_name()}
    return Verdict(architecture, FAILS, reason, dtype=run.entry.dtype, seconds=round(seconds, 1), **here)
