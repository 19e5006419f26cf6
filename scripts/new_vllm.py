#!/usr/bin/env python3
"""Try Weir on a version of vLLM, and write down what was found.

    python scripts/new_vllm.py 0.31.0             # patch points, one engine, the conformance dozen
    python scripts/new_vllm.py 0.31.0 --full      # and the whole test suite
    python scripts/new_vllm.py 0.31.0 --table-only --results found.json

Makes an environment with that version (`setup_env.py`, in /tmp, deleted at the end), checks every place that Weir
patches, starts one engine (`weir doctor`), runs the tests, and writes what was found to a JSON file. From that file
come the version's row of the support table in `docs/explanation/limits.md` and the constants of
`src/vllm_weir/patches/registry.py`. `--table-only` writes these from a JSON file alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "explanation" / "limits.md"
REGISTRY = ROOT / "src" / "vllm_weir" / "patches" / "registry.py"
CHECKER = ROOT / "scripts" / "check_patch_points.py"
COLUMNS = ("vLLM", "ran on", "patch points", "one engine", "conformance", "all tests", "what does not work")
HEADER = f"| {' | '.join(COLUMNS)} |"
LIMITS = {"set-up": 3600, "patch points": 300, "one engine": 900, "conformance": 3600, "all tests": 4 * 3600}
"""Seconds that each step may take."""
SKIPPED = "not run"


@dataclass
class Findings:
    """What was found on one version.

    Attributes:
        ran_on: the device, e.g. ``V1, CPU``.
        patch_points: ``70 of 70``, or which are missing.
        engine: ``works``, or why `weir doctor` is not content.
        conformance, all_tests: ``24 passed, 1 skipped``, or that it was not run.
        remark: one sentence on what does not work; empty if everything does.
    """

    vllm: str
    ran_on: str = ""
    patch_points: str = SKIPPED
    engine: str = SKIPPED
    conformance: str = SKIPPED
    all_tests: str = SKIPPED
    remark: str = ""

    @property
    def works(self) -> bool:
        """Whether an engine started and no test failed."""
        tests = f"{self.conformance} {self.all_tests}"
        return self.engine == "works" and "failed" not in tests and "no result" not in tests

    @property
    def ran(self) -> bool:
        """Whether it counts as a version that ran: an engine works, and a remark explains what failed, if anything."""
        return self.engine == "works" and (self.works or bool(self.remark))

    def row(self) -> str:
        """Return this version's line of the support table."""
        cells = [self.vllm, self.ran_on, self.patch_points, self.engine, self.conformance, self.all_tests, self.remark]
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main() -> int:
    """Run the steps; return 0 if everything works on that version."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="of vLLM, e.g. 0.31.0")
    parser.add_argument("--full", action="store_true", help="run the whole test suite, too")
    parser.add_argument("--flavour", choices=("auto", "cpu", "cuda"), default="auto", help="which vLLM (default: auto)")
    parser.add_argument("--venv", type=Path, help="the environment (default: /tmp/venv-VERSION)")
    parser.add_argument("--keep", action="store_true", help="leave the environment")
    parser.add_argument("--workers", type=int, default=1, help="test processes of --full")
    parser.add_argument("--results", type=Path, help="JSON file (default: /tmp/new-vllm-VERSION.json)")
    parser.add_argument("--remark", default="", help="sentence for the table: what does not work")
    parser.add_argument("--table-only", action="store_true", help="run nothing; write the table from --results")
    given = parser.parse_args()
    results = given.results or Path(f"/tmp/new-vllm-{given.version}.json")
    if given.table_only:
        findings = Findings(**json.loads(results.read_text()))
        findings.remark = given.remark or findings.remark
    else:
        venv = given.venv or Path(f"/tmp/venv-{given.version}")
        findings = Trial(given.version, venv, results).run(given.flavour, given.full, given.workers, given.remark)
        if not given.keep:
            shutil.rmtree(venv, ignore_errors=True)
    write_table(findings)
    write_versions(findings)
    print(f"{findings.row()}\n{TABLE.relative_to(ROOT)} and {REGISTRY.relative_to(ROOT)} are up to date")
    return 0 if findings.works else 1


class Trial:
    """One version in an environment of its own."""

    def __init__(self, version: str, venv: Path, results: Path) -> None:
        self.version, self.venv, self.results = version, venv, results
        self.python = venv / "bin" / "python"
        self.started = time.monotonic()
        self.findings = Findings(version)

    def run(self, flavour: str, full: bool, workers: int, remark: str) -> Findings:
        """Make the environment and run every step; what was found so far is on disk after each."""
        setup = [sys.executable, ROOT / "scripts" / "setup_env.py", "--venv", self.venv, "--flavour", flavour]
        if self.step("set-up", [*setup, "--vllm", self.version]) != 0:
            self.findings.remark = remark or "It could not be installed."
            return self.save()
        self.findings.ran_on = self.device()
        self.findings.patch_points = self.patch_points()
        self.save()
        self.findings.engine = self.engine()
        self.save()
        self.findings.conformance = self.tests("conformance", ["-m", "conformance", "tests/conformance"])
        self.save()
        if full:
            self.findings.all_tests = self.tests("all tests", ["-n", str(workers), "tests"])
        self.findings.remark = remark
        return self.save()

    def step(self, name: str, command: list[str | Path], output: Path | None = None) -> int:
        """Run a command, showing its output or keeping it in a file; return the exit code, -1 if it ran too long."""
        self.say(name)
        environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
        environment.pop("PYTHONPATH", None)
        with open(output or os.devnull, "w") as file:
            try:
                done = subprocess.run(
                    [str(part) for part in command],
                    cwd=ROOT,
                    env=environment,
                    stdout=file if output else None,
                    timeout=LIMITS[name],
                    check=False,
                )
            except subprocess.TimeoutExpired:
                self.say(f"{name}: not done after {LIMITS[name]} s")
                return -1
        return done.returncode

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"[vLLM {self.version}] {time.monotonic() - self.started:5.0f} s  {text}", flush=True)

    def save(self) -> Findings:
        """Write the JSON file."""
        self.results.write_text(json.dumps(asdict(self.findings), indent=1) + "\n")
        return self.findings

    def device(self) -> str:
        """Return the runner and the device."""
        code = "import torch; print('V2, ' + torch.cuda.get_device_name() if torch.cuda.is_available() else 'V1, CPU')"
        return subprocess.check_output([self.python, "-c", code], text=True).strip()

    def patch_points(self) -> str:
        """Check the installed source against the table of patches."""
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        source = subprocess.check_output([self.python, "-c", code], text=True).strip()
        output = self.results.with_suffix(".patch-points.txt")
        self.step("patch points", [self.python, str(CHECKER), source], output)
        found = parse_patch_points(output.read_text())
        self.say(f"patch points: {found}")
        return found

    def engine(self) -> str:
        """Start an engine and compare its rows with transformers, by `weir doctor`."""
        output = self.results.with_suffix(".doctor.json")
        code = self.step("one engine", [self.python, "-m", "vllm_weir.cli.main", "doctor", "--json"], output)
        found = parse_doctor(output.read_text(), code)
        self.say(f"one engine: {found}")
        return found

    def tests(self, name: str, arguments: list[str]) -> str:
        """Run tests; return how many passed, failed and were skipped."""
        report = self.results.with_suffix(f".{name.replace(' ', '-')}.xml")
        report.unlink(missing_ok=True)
        self.step(name, [self.python, "-m", "pytest", "-q", "--tb=line", f"--junitxml={report}", *arguments])
        found = parse_junit(report)
        self.say(f"{name}: {found}")
        return found


def parse_patch_points(text: str) -> str:
    """Return ``70 of 70``, with what is wrong, from the checker's output."""
    counts = re.search(r"(\d+) of (\d+) ", text)
    if counts is None:
        return "no result"
    wrong = [line.strip().split(":")[-2].rsplit(".", 1)[-1] for line in text.splitlines()[1:] if line.strip()]
    return f"{counts[1]} of {counts[2]}" + (f" (without {', '.join(wrong)})" if wrong else "")


def parse_doctor(text: str, code: int) -> str:
    """Return ``works``, or the first problem, from the JSON of `weir doctor`."""
    try:
        report = json.loads(text[text.index("{") :])
    except ValueError:
        return f"no result (exit code {code})"
    return "works" if report["healthy"] else str(report["problems"][0]).splitlines()[0][:200]


def parse_junit(path: Path) -> str:
    """Return ``24 passed, 1 failed (test_conforms[...]), 2 skipped`` from a report of pytest."""
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return "no result"
    failed = [c.get("name", "") for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = sum(c.find("skipped") is not None for c in cases)
    parts = [f"{len(cases) - len(failed) - skipped} passed"]
    if failed:
        names = ", ".join(f"`{name}`" for name in failed[:3]) + (", ..." if len(failed) > 3 else "")
        parts.append(f"{len(failed)} failed ({names})")
    return ", ".join(parts + ([f"{skipped} skipped"] if skipped else []))


def write_table(findings: Findings, path: Path = TABLE) -> None:
    """Put the version's row into the support table, in place of the one that it had on the same device."""
    lines = path.read_text().splitlines()
    start = lines.index(HEADER) + 2
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    rows = [row for row in lines[start:end] if not replaces(findings, row)]
    lines[start:end] = sorted([*rows, findings.row()], key=lambda row: version_key(first_cells(row)[0]))
    path.write_text("\n".join(lines) + "\n")


def replaces(findings: Findings, row: str) -> bool:
    """Whether a row is of the same version, on the same device or none."""
    version, ran_on = first_cells(row)
    return version == findings.vllm and ran_on in ("", findings.ran_on)


def first_cells(row: str) -> tuple[str, str]:
    """Return the version and the device of a row."""
    cells = [cell.strip() for cell in row.strip().strip("|").split("|")]
    return cells[0], cells[1]


def version_key(version: str) -> tuple[int, ...]:
    """Return numbers to sort by."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def write_versions(findings: Findings, path: Path = REGISTRY) -> None:
    """List the version under RAN if it ran there, else under READ if every patch point is in place."""
    text = path.read_text()
    points = re.match(r"(\d+) of (\d+)$", findings.patch_points)
    complete = points is not None and points[1] == points[2]
    ran, read = listed(text, "RAN"), listed(text, "READ") - {findings.vllm}
    if findings.ran:
        ran.add(findings.vllm)
    elif complete and findings.vllm not in ran:
        read.add(findings.vllm)
    for name, versions in (("RAN", ran), ("READ", read)):
        inside = ", ".join(f'"{v}"' for v in sorted(versions, key=version_key))
        text = re.sub(rf"^{name} = \(.*\)$", f"{name} = ({inside}{',' * (len(versions) == 1)})", text, flags=re.M)
    path.write_text(text)


def listed(text: str, name: str) -> set[str]:
    """Return the versions of a constant of the registry."""
    line = re.search(rf"^{name} = \((.*)\)$", text, re.M)
    if line is None:
        raise ValueError(f"{REGISTRY.name} has no line `{name} = (...)`")
    return set(re.findall(r'"([^"]+)"', line[1]))


if __name__ == "__main__":
    sys.exit(main())
