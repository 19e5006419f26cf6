"""`python -m tests.conformance [ARCH ...] [--jobs 1] [--out DIR]` runs the suite; `... docs` writes docs/models.md.

Every architecture has a process of its own and a time limit. They are forked from one that has imported vLLM, because
importing it takes longer than most models take to check.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.conformance.docs import write_docs
from tests.conformance.engine import set_environment
from tests.conformance.verdict import CONFORMS, FAILS, Verdict
from tests.conformance.zoo import ZOO

RESULTS = Path(__file__).parent / "results" / "cpu-0.32.json"
DOCS = Path(__file__).parents[2] / "docs" / "models.md"
LIMIT = 300.0
"""Seconds for one architecture."""


def main() -> int:
    """The command; 1 if anything fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__.splitlines()[0])
    parser.add_argument("architectures", nargs="*", metavar="ARCH", help="default: all; `docs`: only write the table")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a directory for one JSON and one log per architecture")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the table's source, updated with this run")
    parser.add_argument("--retry", action="store_true", help="also what the zoo says cannot be run")
    arguments = parser.parse_args()
    if arguments.architectures == ["docs"]:
        write_docs(load_results(arguments.results), DOCS)
        return 0
    unknown = set(arguments.architectures) - set(ZOO)
    if unknown:
        parser.error(f"not in the zoo: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="weir-conformance-") as scratch:
        out = arguments.out or Path(scratch)
        verdicts = run_all(arguments.architectures or sorted(ZOO), out, arguments.jobs, retry=arguments.retry)
    save_results(verdicts, arguments.results)
    failed = [v.architecture for v in verdicts if v.verdict == FAILS]
    print(f"{sum(v.verdict == CONFORMS for v in verdicts)} of {len(verdicts)} conform, {len(failed)} fail", *failed)
    return 1 if failed else 0


def load_results(path: Path) -> dict[str, Verdict]:
    """Architecture -> verdict."""
    return {v["architecture"]: Verdict(**v) for v in json.loads(path.read_text())} if path.exists() else {}


def save_results(verdicts: list[Verdict], path: Path) -> None:
    """Put new verdicts in the place of older ones."""
    known = load_results(path) | {v.architecture: v for v in verdicts}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(known[a]) for a in sorted(known) if a in ZOO], indent=1) + "\n")


def run_all(architectures: list[str], out: Path, jobs: int, *, retry: bool = False) -> list[Verdict]:
    """Run them, `jobs` at a time, and show how far it is."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    set_environment()
    out.mkdir(parents=True, exist_ok=True)
    _import_everything()
    waiting, running, verdicts = list(architectures), {}, []
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns) as progress:
        task = progress.add_task("", total=len(architectures))
        while waiting or running:
            while waiting and len(running) < jobs:
                architecture = waiting.pop(0)
                running[architecture] = _start(architecture, out, retry)
            progress.update(task, description=" ".join(running))
            time.sleep(0.1)
            for architecture, (process, started) in list(running.items()):
                verdict = _finished(architecture, process, started, out)
                if verdict is not None:
                    del running[architecture]
                    verdicts.append(verdict)
                    progress.advance(task)
                    progress.console.print(_line(verdict), highlight=False)
    return verdicts


def _line(verdict: Verdict) -> str:
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


def _start(architecture: str, out: Path, retry: bool) -> tuple[Any, float]:
    process = multiprocessing.get_context("fork").Process(target=_child, args=(architecture, out, retry))
    process.start()
    return process, time.monotonic()


def _child(architecture: str, out: Path, retry: bool) -> None:
    # A session of its own: whatever it starts ends with it.
    os.setsid()
    log = os.open(out / f"{architecture}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from tests.conformance.run_one import run_one

    with tempfile.TemporaryDirectory(prefix="weir-zoo-") as scratch:
        run_one(architecture, Path(scratch) / architecture, retry=retry).save(out / f"{architecture}.json")
    sys.stdout.flush()
    os._exit(0)


def _finished(architecture: str, process: Any, started: float, out: Path) -> Verdict | None:
    late = time.monotonic() - started > LIMIT
    if process.is_alive() and not late:
        return None
    if process.is_alive():
        os.killpg(process.pid, 9)
    process.join()
    written = out / f"{architecture}.json"
    if not late and written.exists() and process.exitcode == 0:
        return Verdict.load(written)
    reason = f"not done after {LIMIT:.0f} s" if late else f"the process ended with {process.exitcode}"
    return Verdict(architecture, FAILS, reason, seconds=round(time.monotonic() - started, 1))


if __name__ == "__main__":
    sys.exit(main())
