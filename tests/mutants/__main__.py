"""Put each seeded fault into a copy of the source and run the tests that reach it.

    python -m tests.mutants [ID or AREA ...] [--tier fast|all] [--jobs N] [--list] [--whole]

A fault is killed if a test fails with it and passes without it. The test that killed it last time is tried first, all
that the table names after that.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants import results
from tests.mutants.table import ROOT, Mutant, load
from tests.mutants.trial import Tree, Trial, import_once

A_TEST = {"tests/unit": 120.0, "": 300.0}
"""Seconds for a test, by where it is: many times what any takes on a busy machine."""
ALL_TESTS = 1800.0


@dataclass
class Task:
    """Tests to run, with a fault or without one."""

    mutant: Mutant | None
    tests: tuple[str, ...]
    more: tuple[str, ...] = ()
    """What to run after that if all of them pass."""


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is known by then is confirmed and stored
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores for what runs in the background
    options = _options()
    table = load()
    chosen = [m for m in table.values() if not options.names or {m.id, m.area} & set(options.names)]
    if unknown := set(options.names) - {m.id for m in table.values()} - {m.area for m in table.values()}:
        print(f"no such fault: {', '.join(sorted(unknown))}")
        return 2
    if options.list:
        for mutant in chosen:
            print(f"{mutant.id}: {mutant.fault} ({mutant.file}; {' '.join(mutant.tests)})")
        return 0
    known = results.read()
    misfits = dict(_misfits(chosen))
    tasks = [_task(m, None if options.whole else known.get(m.id)) for m in chosen if m.id not in misfits]
    print(f"{len(tasks)} faults, {options.jobs} at a time", flush=True)
    folder = ROOT / "out" / "mutants"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as scratch:
        import_once()
        lab = Laboratory(Path(scratch), options.jobs, options.tier)
        found: dict[str, dict[str, Any]] = {}
        try:
            lab.run(tasks, found)
        finally:
            lab.confirm(found)
            results.write(table, results.read() | found)
    for name, why in misfits.items():
        print(f"not applicable {name}: {why}")
    killed = sum(result["killed_by"] is not None for result in found.values())
    print(f"{killed} killed, {len(found) - killed} survived" + (f", {len(misfits)} not applicable" if misfits else ""))
    return 0 if killed == len(chosen) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="ID", help="faults, or areas of the table; all without one")
    parser.add_argument("--tier", choices=("fast", "all"), default="fast", help="which tests may kill")
    parser.add_argument("--jobs", type=int, default=2, help="so many at a time")
    parser.add_argument("--list", action="store_true", help="show the faults and end")
    parser.add_argument("--whole", action="store_true", help="run all named tests, whatever killed a fault before")
    return parser.parse_args()


def _misfits(mutants: Iterable[Mutant]) -> Iterator[tuple[str, str]]:
    for mutant in mutants:
        try:
            mutant.applied()
        except LookupError as error:
            yield mutant.id, str(error)


def _task(mutant: Mutant, known: dict[str, Any] | None) -> Task:
    killer = (known or {}).get("killed_by")
    if killer is not None and (ROOT / killer.partition("::")[0]).exists():
        return Task(mutant, (killer,), mutant.tests)
    return Task(mutant, mutant.tests)


class Laboratory:
    """Runs tasks, several at a time, each in a copy of the repository."""

    def __init__(self, scratch: Path, jobs: int, tier: str) -> None:
        self._trees = [Tree(scratch / str(n)) for n in range(jobs)]
        self._tier = tier

    def run(self, tasks: Iterable[Task], found: dict[str, dict[str, Any]]) -> None:
        """Enter into `found` what came of each fault."""
        waiting = list(tasks)
        total = len(waiting)
        for task, outcome in self._finish(waiting, to_first=True):
            mutant = task.mutant
            assert mutant is not None
            if not outcome["failed"] and task.more:
                waiting.append(Task(mutant, task.more))
                continue
            killer, how = next(iter(outcome["failed"].items()), (None, None))
            tier = None if killer is None else "all" if killer in outcome["thorough"] else "fast"
            found[mutant.id] = {"killed_by": killer, "how": how, "tier": tier, "seconds": outcome["seconds"]}
            what = f"killed by {killer} ({how})" if killer else f"SURVIVED {outcome['passed']} tests"
            if not killer and outcome["missing"]:
                what = f"SURVIVED: no test of this tier in {' '.join(task.tests)}"
            print(f"[{len(found)}/{total}] {mutant.id}: {what}, {outcome['seconds']:.0f} s", flush=True)

    def confirm(self, found: dict[str, dict[str, Any]]) -> None:
        """Run what killed without any fault: what fails there, too, has killed nothing."""
        killers = sorted({result["killed_by"] for result in found.values() if result["killed_by"] is not None})
        unit = tuple(test for test in killers if test.startswith("tests/unit/"))
        other = tuple(test for test in killers if test not in unit)
        failed: set[str] = set()
        for task, outcome in self._finish([Task(None, tests) for tests in (other, unit) if tests], to_first=False):
            wrong = outcome["failed"]
            failed |= set(task.tests) if outcome["missing"] else set(wrong)
            print(
                f"without a fault: {len(task.tests)} tests, {len(wrong)} fail, {outcome['seconds']:.0f} s", flush=True
            )
        for name, result in found.items():
            if (killer := result["killed_by"]) in failed:
                print(f"{name}: SURVIVED, as {killer} fails without the fault, too", flush=True)
                result |= {"killed_by": None, "how": None, "tier": None}

    def _finish(self, waiting: list[Task], to_first: bool) -> Iterator[tuple[Task, dict[str, Any]]]:
        """Each task with its outcome, as they end; `waiting` may grow meanwhile."""
        free, running = list(self._trees), list[tuple[Task, Trial]]()
        try:
            while waiting or running:
                while waiting and free:
                    task, tree = waiting.pop(0), free.pop()
                    tree.hold(task.mutant)
                    trial = Trial(tree, task.tests, ALL_TESTS)
                    a_test = next(limit for place, limit in A_TEST.items() if task.tests[0].startswith(place))
                    trial.start(self._tier, a_test, to_first)
                    running.append((task, trial))
                for task, trial in running:
                    if (outcome := trial.poll()) is not None:
                        running.remove((task, trial))
                        free.append(trial.tree)
                        self._keep_log(task, trial, outcome)
                        yield task, outcome
                        break
                else:
                    time.sleep(0.02)
        finally:
            for _, trial in running:
                trial.stop()

    def _keep_log(self, task: Task, trial: Trial, outcome: dict[str, Any]) -> None:
        name = task.mutant.id if task.mutant else "without-a-fault"
        shutil.copy(trial.log, ROOT / "out" / "mutants" / f"{name}.log")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # frozen objects outlive the interpreter, of which libraries complain
