"""Run a tier of the tests, and say at the end what ran and what was left out.

    python -m tests.tiers fast                 # `make test`: what a newcomer and every commit run
    python -m tests.tiers all [--store]        # `make test-all`: the rest as well, and more examples a property
    python -m tests.tiers reached [--minutes]  # what `all` has beyond `fast`, of what the change since the stored
                                               # run reaches

What follows `--` goes to pytest. Unit tests and tests with engines are two runs of pytest one after the other: an
engine's process need not collect four thousand unit tests first.

With `--again N`, at most N tests that fail are run a second time, each file in a process of its own with nothing
beside it. One that passes then is reported as unsteady, and does not fail the run: `.ci/run` asks for this, the nightly
run does not. More than N failures, or a test that fails twice, are failures.

`tests/durations.json` has the commit of the last complete `all` and the seconds of each file; `--store` writes it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
DURATIONS = ROOT / "tests" / "durations.json"
REPORTS = ROOT / "out" / "tests"
PARTS = {"unit": ["tests/unit"], "engine": ["tests/engine", "tests/traps", "tests/conformance"]}
COMMON = "not gpu and not slow"
THOROUGH = "--hypothesis-profile=thorough"
SOME_FAILED, NOTHING_RAN = 1, 5
"""Pytest's exit codes where a test failed, and where none was selected."""


class Outcome(NamedTuple):
    """What a run of pytest said of one test."""

    file: str
    name: str
    verdict: str
    """`passed`, `failed`, `skipped`, or `unsteady`: failed, and passed when run again alone."""
    reason: str
    seconds: float
    id: str = ""
    """What pytest runs the test by."""


@cache
def stored() -> dict:
    """Return the last complete run: its `commit`, and the `seconds` of each file."""
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {"commit": None, "seconds": {}}


def stored_seconds() -> dict[str, float]:
    """Return how long each file took in the last complete run."""
    return stored()["seconds"]


def main() -> int:
    """Run what the command line says; 0 if nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tier", choices=("fast", "all", "reached"))
    parser.add_argument("--workers", type=int, default=2, help="processes, each with an engine of its own (default: 2)")
    parser.add_argument("--minutes", type=float, help="begin no test after so many minutes")
    parser.add_argument("--again", type=int, default=0, metavar="N", help="run up to N failed tests again, alone")
    parser.add_argument("--since", help="the commit that `reached` compares with (default: that of the stored run)")
    parser.add_argument("--store", action="store_true", help="store the durations of a run in which nothing failed")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    args = parser.parse_args(own)
    started = time.time()
    common = ["-n", str(args.workers), *sys.argv[len(own) + 2 :]]
    if args.minutes is not None:
        common += ["--until", str(started + 60 * args.minutes)]
    runs = _runs(args.tier, args.since)
    codes = [run(part, [*these, *common]) for part, these in runs.items()]
    outcomes = [one for part in runs for one in read_report(REPORTS / f"{part}.xml")]
    if SOME_FAILED in codes and set(codes) <= {0, SOME_FAILED, NOTHING_RAN}:
        profile = () if args.tier == "fast" else (THOROUGH,)
        outcomes = run_again(outcomes, args.again, lambda part, ids: run(part, [*profile, "-n0", *ids]))
        codes = [SOME_FAILED if any(one.verdict == "failed" for one in outcomes) else 0]
    failed = any(code not in (0, NOTHING_RAN) for code in codes)
    if args.store and not failed:
        store(outcomes)
    if args.tier == "reached" and not runs:
        return 0  # the change reaches nothing: "0 passed" would read as a run without tests
    print("\n".join(summary(outcomes, time.time() - started)), flush=True)
    return 1 if failed or not (outcomes or args.tier == "reached") else 0


def _runs(tier: str, since: str | None) -> dict[str, list[str]]:
    """Return the arguments of each run of pytest."""
    if tier == "fast":
        return {part: ["-m", f"{COMMON} and not thorough", *paths] for part, paths in PARTS.items()}
    thorough = [THOROUGH, "-m"]
    if tier == "all":
        return {part: [*thorough, COMMON, *paths] for part, paths in PARTS.items()}
    from tests.reach import changed_since, reached_tests

    since = since or stored()["commit"]
    files = reached_tests(changed_since(since))
    print(f"[tests] the change since {since} reaches {len(files)} test files", flush=True)
    chosen = {part: [f for f in files if f.startswith(tuple(paths))] for part, paths in PARTS.items()}
    # Unit tests again for their further examples; of the others what the fast tier does not have.
    marks = {"unit": COMMON, "engine": f"{COMMON} and thorough"}
    return {part: [*thorough, marks[part], *these] for part, these in chosen.items() if these}


def run(part: str, arguments: Sequence[str]) -> int:
    """Run pytest, which shows its progress; its report is `out/tests/PART.xml`. Return its exit code."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    report = REPORTS / f"{part}.xml"
    report.unlink(missing_ok=True)
    print(f"[tests] {part} tests", flush=True)
    return subprocess.call([sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *arguments], cwd=ROOT)


def read_report(report: Path) -> list[Outcome]:
    """Return the outcome of every test of a report."""
    if not report.exists():
        return []
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        told = {child.tag: child.get("message", "") for child in case}
        verdict = "failed" if {"failure", "error"} & set(told) else "skipped" if "skipped" in told else "passed"
        classname, name = case.get("classname", ""), case.get("name", "")
        file = _file_of(classname)
        inside = classname.removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
        test = "::".join(filter(None, (file, inside.replace(".", "::"), name)))
        found.append(Outcome(file, name, verdict, told.get("skipped", ""), float(case.get("time", 0)), test))
    return found


def run_again(
    outcomes: list[Outcome], at_most: int, run: Callable[[str, Sequence[str]], object], reports: Path = REPORTS
) -> list[Outcome]:
    """Run the failed tests again, file by file, if they are `at_most` so many; those that pass are `unsteady` then.

    A test with a failure and an error has two outcomes; both are of one test.
    """
    failed = list(dict.fromkeys(one.id for one in outcomes if one.verdict == "failed"))
    if len(failed) > at_most:
        return outcomes
    passed = set()
    for number, file in enumerate(dict.fromkeys(test.partition("::")[0] for test in failed)):
        ids = [test for test in failed if test.partition("::")[0] == file]
        run(part := f"again-{number}", ids)
        second = read_report(reports / f"{part}.xml")
        passed |= {test for test in ids if {one.verdict for one in second if one.id == test} == {"passed"}}
    return [one._replace(verdict="unsteady") if one.id in passed else one for one in outcomes]


@cache
def _file_of(classname: str) -> str:
    """Return the file of `tests.unit.test_x` or `tests.unit.test_x.TestClass`, relative to the repository."""
    parts = classname.split(".")
    for end in range(len(parts), 0, -1):
        path = Path(*parts[:end]).with_suffix(".py")
        if (ROOT / path).exists():
            return path.as_posix()
    return classname


def store(outcomes: Iterable[Outcome]) -> None:
    """Write the seconds of each file, with the commit that they are of."""
    seconds: Counter[str] = Counter()
    for one in outcomes:
        seconds[one.file] += one.seconds
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    rounded = {file: round(seconds[file], 1) for file in sorted(seconds)}
    DURATIONS.write_text(json.dumps({"commit": commit, "seconds": rounded}, indent=1) + "\n")


def summary(outcomes: Sequence[Outcome], seconds: float) -> list[str]:
    """Return the closing lines: what failed, what was skipped and why, how long it took, the counts."""
    verdicts = Counter(one.verdict for one in outcomes)
    lines = ["", *(f"FAILED {one.file}: {one.name}" for one in outcomes if one.verdict == "failed")]
    lines += [f"UNSTEADY, passed when run again: {one.id}" for one in outcomes if one.verdict == "unsteady"]
    skipped = Counter((one.reason, one.file) for one in outcomes if one.verdict == "skipped")
    for reason in dict.fromkeys(reason for reason, _ in skipped):
        files = [f"{file} ({n})" for (why, file), n in skipped.items() if why == reason]
        lines.append(f"skipped, {reason}: {', '.join(files)}")
    lines.append(f"[tests] {seconds / 60:.1f} minutes")
    counts = f"{verdicts['passed']} passed, {verdicts['failed']} failed"
    counts += f", {verdicts['unsteady']} unsteady" if verdicts["unsteady"] else ""
    lines.append(counts + (f", {verdicts['skipped']} skipped" if verdicts["skipped"] else ""))
    return lines


if __name__ == "__main__":
    sys.exit(main())
