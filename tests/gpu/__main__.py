"""The tests that hold on a GPU: several processes beside each other on each card, what came of every test as JSON.

python -m tests.gpu                          # all, on all cards of this machine
python -m tests.gpu --part 2/4               # the second of four parts, each at most nine minutes on one H100
python -m tests.gpu --part two               # what needs two cards
python -m tests.gpu tests/gpu/test_x.py ...  # these files

A part of its own are the tests that need two cards; on a machine with one they are skipped. The others are shared out
by how long they took before, as files in `bench/results/` say. Tests of one file stay together, since they share an
engine, unless they take longer than a few minutes. Each process has one card and a share of its memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.gpu.plugin import LIST, RESULTS, RUN

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "bench/results"
BESIDE = 8
"""Processes on a card: they compile and check on the host most of the time."""
LIMIT = 540.0
"""Seconds that a part may take."""
TOGETHER = 100.0
"""Seconds that tests of one file may take in one process; longer files are cut."""
GUESS, START = 2.0, 20.0
"""Seconds of a test that has not run before, and of a process's imports."""
FIRST, ALONE = 4, 45.0
"""Processes on a card for so many seconds: what they compile the later ones find in caches, and do not compile again.
"""
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]}
"""CUDA graphs of a few sizes, and nothing compiled: that takes longer than the tests, and tests/gpu has it."""
ENGINE_ENV = {
    "WEIR_TEST_ENGINE": json.dumps({"enforce_eager": False, "compilation_config": GRAPHS}),
    # Products as float32 rounds them; by default attention rounds as TF32, and the bounds are those of a CPU.
    "TRITON_F32_DEFAULT": "ieee",
}
"""What tests/engine needs on a GPU."""
IN_PIECES = {"test_kv_connectors.py", "test_kv_failures.py", "test_multimodal.py", "test_pooling.py"}
"""Files whose engines are compiled all the same, with graphs in pieces: between them vLLM's connectors save the keys
and values of each layer, and attention sees which positions are an image's; pooling has no other graphs."""
ON_THE_HOST = {
    f"test_{name}.py"
    for name in (
        *(
            "backend",
            "compiled",
            "bench",
            "client_server",
            "consumer_package",
            "controller_package",
            "crowd",
            "disk_full",
            "docs",
        ),
        *("examples", "extract_engine", "extract_features", "inspect", "missing", "multimodal_server", "notebooks"),
        *("page", "serve", "serve_admin", "serve_parsers", "serve_probes", "serve_processes", "serve_saes", "soak"),
        *("start", "model_facts", "neighbours", "replay", "routing", "serve_store"),
    )
}
"""Files of tests/engine that are left out: what they test runs on the host (servers, programs, pages), or is how
vLLM runs on a CPU: its compile backend, its layers, and what hooks see of each pass."""


@dataclass
class Unit:
    """Tests of one file that one process runs."""

    file: str
    cards: int
    tests: list[str] = field(default_factory=list)
    seconds: float = START

    @property
    def env(self) -> dict[str, str]:
        """What differs from the environment."""
        if not self.file.startswith("tests/engine/"):
            return {}
        from vllm_weir.schema.hooks import BLOCK_HOOKS, DERIVED_HOOKS, MODEL_HOOKS

        # Runner V1 (pooling, n-gram drafts, prompts as embeddings) has the points between blocks alone unless told.
        hooks = [hook for hook in (*MODEL_HOOKS, *BLOCK_HOOKS) if hook not in DERIVED_HOOKS]
        env = ENGINE_ENV | {"WEIR_HOOKS": ",".join(hooks)}
        if Path(self.file).name in IN_PIECES:
            env["WEIR_TEST_ENGINE"] = json.dumps({"enforce_eager": False})
        return env


@dataclass
class Running:
    """A unit's process."""

    unit: Unit
    cards: tuple[int, ...]
    process: subprocess.Popen[bytes]
    results: Path
    log: Path
    began: float


Found = dict[str, dict[str, Any]]
"""Test -> its outcome, seconds and, unless it passed, the reason."""


def files() -> list[str]:
    """Return the files whose tests hold on a GPU."""
    found = [*(ROOT / "tests/gpu").glob("test_*.py"), *(ROOT / "tests/engine").glob("test_*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in found if path.name not in ON_THE_HOST)


def pytest(arguments: Sequence[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow",
        "-p",
        "tests.gpu.plugin",
        "-p",
        "no:cacheprovider",
    ]
    with log.open("wb") as out:
        return subprocess.Popen(
            [*command, *arguments], cwd=ROOT, env=os.environ | env, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip


def collect(chosen: Sequence[str], folder: Path) -> list[tuple[str, int, str | None]]:
    """Return every test, how many cards it needs, and why it cannot run here."""
    listed, log = folder / "tests.json", folder / "collect.log"
    code = pytest(["--collect-only", *chosen], {LIST: str(listed)}, log).wait()
    if code:
        sys.exit(f"the tests cannot be collected:\n{log.read_text()[-4000:]}")
    return [(test, cards, reason) for test, cards, reason in json.loads(listed.read_text())]


def durations() -> dict[str, float]:
    """Return how long each test took the last times."""
    known: dict[str, float] = {}
    for path in sorted(STORED.glob("gpu_tests_*.json")):
        for test, found in json.loads(path.read_text())["tests"].items():
            known[test] = max(known.get(test, 0.0), found["seconds"])
    return known


def units(tests: Sequence[tuple[str, int]]) -> list[Unit]:
    """Return the tests of each file, in order, cut where they take too long; the longest first."""
    known, made, last = durations(), [], {}
    for test, cards in tests:
        file, seconds = test.partition("::")[0], known.get(test, GUESS)
        unit = last.get((file, cards))
        if unit is None or unit.seconds + seconds > START + TOGETHER:
            made.append(unit := Unit(file, cards))
            last[file, cards] = unit
        unit.tests.append(test)
        unit.seconds += seconds
    return sorted(made, key=lambda unit: (-unit.cards, -unit.seconds, unit.tests[0]))


def part_of(every: Sequence[Unit], part: str | None) -> list[Unit]:
    """Return the units of a part: "k/n", "two" or None for all."""
    if part is None:
        return list(every)
    if part == "two":
        return [unit for unit in every if unit.cards == 2]
    k, n = map(int, part.split("/"))
    if not 1 <= k <= n:
        raise ValueError(part)
    shares: list[list[Unit]] = [[] for _ in range(n)]
    for unit in every:
        if unit.cards == 1:
            min(shares, key=lambda share: sum(one.seconds for one in share)).append(unit)
    return shares[k - 1]


def run(waiting: list[Unit], cards: Sequence[str], given: argparse.Namespace, folder: Path) -> Found:
    """Run units, the first first, `given.beside` on each card."""
    until, found, running, done, total = time.monotonic() + given.limit, Found(), [], 0, len(waiting)
    busy: Counter[int] = Counter()
    began = time.monotonic()
    while waiting or running:
        late = time.monotonic() > until
        for one in [one for one in running if late or one.process.poll() is not None]:
            running.remove(one)
            busy.subtract(one.cards)
            end(one)
            outcome = outcomes(one, given.limit if late else None)
            found |= outcome
            done += 1
            said = Counter(of["outcome"] for of in outcome.values())
            counted = ", ".join(f"{n} {what}" for what, n in sorted(said.items()))
            took = time.monotonic() - one.began
            print(
                f"[{done}/{total}] {time.monotonic() - began:.0f} s  {one.unit.file}: {counted} ({took:.0f} s)",
                flush=True,
            )
            report(outcome, one.log)
        if late:
            for unit in waiting:
                found |= {test: failed(f"not started within {given.limit:.0f} s") for test in unit.tests}
            return found
        most = given.beside if time.monotonic() > began + ALONE else min(FIRST, given.beside)
        for unit in list(waiting):
            free = sorted((card for card in range(len(cards)) if busy[card] < most), key=lambda card: busy[card])
            if len(free) < unit.cards:
                continue
            waiting.remove(unit)
            mine = tuple(sorted(free[: unit.cards]))
            busy.update(mine)
            running.append(start(unit, mine, cards, given, folder / f"{total - len(waiting):03}"))
        time.sleep(0.2)
    return found


def start(unit: Unit, mine: tuple[int, ...], cards: Sequence[str], given: argparse.Namespace, name: Path) -> Running:
    wanted, results, log = (name.with_suffix(end) for end in (".tests", ".results", ".log"))
    wanted.write_text(json.dumps(unit.tests))
    env = unit.env | {
        "CUDA_VISIBLE_DEVICES": ",".join(cards[card] for card in mine),
        "WEIR_TEST_GPU_SHARE": f"{0.9 / given.beside:.2f}",
        RUN: str(wanted),
        RESULTS: str(results),
    }
    process = pytest([unit.file, "--tb=short", "-rN"], env, log)
    return Running(unit, mine, process, results, log, time.monotonic())


def end(one: Running) -> None:
    """End a process and whatever it has started: an engine would hold the card's memory."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.process.pid, signal.SIGKILL)
    one.process.wait()


def failed(reason: str) -> dict[str, Any]:
    return {"outcome": "failed", "seconds": 0.0, "reason": reason}


def outcomes(one: Running, limit: float | None) -> Found:
    """Return what came of a unit's tests; `limit`: it was ended after so many seconds."""
    found, began = Found(), set()
    for line in one.results.read_text().splitlines() if one.results.exists() else ():
        said = json.loads(line)
        if said.get("began"):
            began.add(said["test"])
            continue
        test = found.setdefault(said["test"], {"outcome": "passed", "seconds": 0.0})
        test["seconds"] = round(test["seconds"] + said["seconds"], 2)
        if said["outcome"] != "passed" and test["outcome"] != "failed":
            test |= {"outcome": said["outcome"], "reason": " ".join(said["reason"].split())[:500]}
    ended = f"ended by the limit of {limit:.0f} s" if limit else f"the process ended with {one.process.returncode}"
    for test in one.unit.tests:
        if test not in found:
            found[test] = failed(ended if test in began else f"not reached: {ended}")
    return found


def report(outcome: Found, log: Path) -> None:
    """Print what failed, and the end of its process's log."""
    wrong = {test: of for test, of in outcome.items() if of["outcome"] == "failed"}
    for test, of in wrong.items():
        print(f"    FAILED {test}: {of['reason']}", flush=True)
    if wrong:
        print(f"    {log}", flush=True)


def machine_facts() -> dict[str, Any]:
    """Return what the results depend on."""
    import torch

    return {
        "card": torch.cuda.get_device_name(),
        "vllm": version("vllm"),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def default_out(facts: dict[str, Any]) -> Path:
    card = re.search(r"[A-Z]+\d+", facts["card"].replace("NVIDIA ", ""))
    release = "".join(facts["vllm"].split(".")[:2])
    return STORED / f"gpu_tests_{card.group().lower() if card else 'gpu'}_vllm{release}.json"


def store(path: Path, facts: dict[str, Any], found: Found, known: set[str] | None) -> None:
    """Write what was found; of other tests (None: all, otherwise those there are) the file keeps what it has."""
    before: Found = {}
    if path.exists() and (kept := json.loads(path.read_text())).get("vllm") == facts["vllm"]:
        before = {test: of for test, of in kept["tests"].items() if known is None or test in known}
    tests = dict(sorted((before | found).items()))
    counted = Counter(of["outcome"] for of in tests.values())
    head = facts | {outcome: counted[outcome] for outcome in ("passed", "failed", "skipped")}
    if known is not None:
        head["not run"] = len(known - tests.keys())  # other parts'
    lines = ",\n".join(f"  {json.dumps(test)}: {json.dumps(of)}" for test, of in tests.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head, indent=1).removesuffix("\n}") + f',\n "tests": {{\n{lines}\n }}\n}}\n')


def reasons(found: Found) -> Iterator[str]:
    skipped = Counter(of["reason"] for of in found.values() if of["outcome"] == "skipped")
    return (f"{n}: {reason}" for reason, n in skipped.most_common())


def main() -> int:
    """The command; 1 if a test fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help="default: all that hold on a GPU")
    parser.add_argument("--part", metavar="k/n|two", help="default: all of them")
    parser.add_argument("--beside", type=int, default=BESIDE, help="processes on a card")
    parser.add_argument("--limit", type=float, help=f"seconds after which all are ended; {LIMIT:.0f} for a part")
    parser.add_argument("--out", type=Path, help="default: in bench/results/, by card and version")
    parser.add_argument("--logs", type=Path, help="a folder for the processes' logs")
    given = parser.parse_args()
    given.limit = given.limit or (LIMIT if given.part else math.inf)
    import torch

    if not torch.cuda.is_available():
        parser.error("no NVIDIA GPU answers")
    visible, facts = os.environ.get("CUDA_VISIBLE_DEVICES"), machine_facts()
    cards = visible.split(",") if visible else [str(card) for card in range(torch.cuda.device_count())]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="weir-gpu-") as scratch:
        folder = given.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        collected = collect(given.files or files(), folder)
        runnable = [(test, wanted) for test, wanted, reason in collected if reason is None]
        chosen = part_of(units(runnable), given.part)
        last = given.part is None or given.part == "two" or len(set(given.part.split("/"))) == 1
        found: Found = {
            test: {"outcome": "skipped", "seconds": 0.0, "reason": reason}
            for test, _, reason in collected
            if reason is not None and last
        }
        print(
            f"{sum(len(unit.tests) for unit in chosen)} tests in {len(chosen)} processes on {len(cards)} cards",
            flush=True,
        )
        found |= run(chosen, cards, given, folder)
    counted = Counter(of["outcome"] for of in found.values())
    facts |= {"cards": len(cards), "beside": given.beside, "seconds": round(time.monotonic() - began)}
    known = None if given.files else {test for test, *_ in collected}
    store(given.out or default_out(facts), facts, found, known)
    for line in reasons(found):
        print(f"skipped {line}")
    print(", ".join(f"{counted[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped")))
    return int(counted["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
