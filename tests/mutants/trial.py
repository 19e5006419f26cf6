"""One run of pytest over a copy of the repository, in a fork of a process that has imported what all of them need."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from tests.mutants.table import ROOT, Mutant

COPIED = ("src", "tests", "examples", "scripts", "bench", "docs")
ALONE = ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "mkdocs.yml", "LICENSE")
# What tests set before torch and vLLM are imported: `tests/conftest.py` and `tests/support/engines.py`.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
IMPORTED = (
    "pytest", "hypothesis", "hypothesis.strategies", "numpy", "torch", "transformers", "safetensors.torch", "triton",
    "pydantic", "fastapi", "fastapi.testclient", "uvicorn", "httpx", "openai", "typer.testing",
    "vllm", "vllm.entrypoints.openai.api_server", "vllm.model_executor.models.llama", "vllm.v1.engine.async_llm",
    "vllm.v1.engine.llm_engine", "vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker",
)  # fmt: skip
TIERS = {
    "fast": ["-m", "not gpu and not slow and not thorough"],
    "all": ["-m", "not gpu and not slow", "--hypothesis-profile=thorough"],
}
"""Options of pytest."""
NO_TESTS = (4, 5)
"""What pytest returns where a named test is not there, or none was selected."""


def import_once() -> None:
    """Import what most of a short run's time goes into, but nothing of Weir."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for plugin in entry_points(group="pytest11"):
        with contextlib.suppress(ImportError):
            plugin.load()
    from vllm import LLM  # noqa: F401

    assert not any(name.partition(".")[0] == "vllm_weir" for name in sys.modules), "every run imports its own"
    gc.collect()
    gc.freeze()


class Tree:
    """A copy of the repository in which one file at a time is another."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._changed: Mutant | None = None
        for name in COPIED:
            shutil.copytree(ROOT / name, path / name)
        for name in ALONE:
            if (ROOT / name).exists():
                shutil.copy2(ROOT / name, path / name)
        for name in (".venv", ".git"):
            if (ROOT / name).exists():
                (path / name).symlink_to(ROOT / name)

    def hold(self, mutant: Mutant | None) -> None:
        """Undo the fault that is there, and put in another."""
        if self._changed is not None:
            self._write(self._changed.path, self._changed.original())
        if mutant is not None:
            self._write(mutant.path, mutant.applied())
        self._changed = mutant

    def _write(self, file: Path, text: str) -> None:
        """Write a file, and remove what it was compiled to: that has the same time and maybe the same length."""
        (self.path / file).write_text(text)
        for compiled in (self.path / file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()


@dataclass
class Trial:
    """One run, under way in a process of its own."""

    tree: Tree
    tests: Sequence[str]
    limit: float
    """Seconds for all of it."""
    pid: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def _said(self) -> Path:
        return self.tree.path / "outcome.json"

    @property
    def log(self) -> Path:
        """What pytest printed."""
        return self.tree.path / "log.txt"

    def start(self, tier: str, a_test: float, to_first: bool) -> None:
        """Fork the process.

        Args:
            tier: which tests count, a key of `TIERS`.
            a_test: seconds after which a test has failed.
            to_first: end at the first failure.
        """
        self._said.unlink(missing_ok=True)
        options = [
            "-q", "-q", "--tb=short", "--no-header", "-p", "no:cacheprovider", "--color=no",
            f"--basetemp={self.tree.path / 'tmp'}", f"--timeout={a_test}", *TIERS[tier], *(["-x"] * to_first),
        ]  # fmt: skip
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _become(self.tree.path, self.log)
                import pytest

                code = int(pytest.main([*options, *self.tests], plugins=[Witness(self._said)]))
            except BaseException as error:  # noqa: BLE001
                print(repr(error), file=sys.stderr)
                code = 70
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> dict[str, Any] | None:
        """What came of it; None while it runs.

        "failed" maps each failed test to "failed", "timeout", "crash" or "import", "thorough" has the failed tests with
        that mark, "passed" counts the others, and "missing" says that there was no such test.
        """
        found, status = os.waitpid(self.pid, os.WNOHANG)
        late = not found and time.monotonic() - self.began > self.limit
        if not found and not late:
            return None
        self._end_all()
        if late:
            os.waitpid(self.pid, 0)
        said = json.loads(self._said.read_text()) if self._said.exists() else {}
        outcome = {"failed": {}, "thorough": [], "passed": 0, "running": None} | said
        code = None if late else os.waitstatus_to_exitcode(status)
        outcome["missing"] = code in NO_TESTS and not outcome["failed"]
        if not outcome["failed"] and (late or code not in (0, *NO_TESTS)):
            outcome["failed"] = {outcome["running"] or self.tests[0]: "timeout" if late else "crash"}
        outcome["seconds"] = round(time.monotonic() - self.began, 1)
        return outcome

    def _end_all(self) -> None:
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """End it now."""
        self._end_all()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


class Witness:
    """A plugin of pytest that writes down which tests failed, and which was running when the process ended."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._outcome: dict[str, Any] = {"failed": {}, "thorough": [], "passed": 0, "running": None}
        self._marked: set[str] = set()

    def _write(self) -> None:
        self._file.write_text(json.dumps(self._outcome))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._outcome["failed"][report.nodeid] = "import"
            self._write()

    def pytest_collection_finish(self, session: Any) -> None:
        self._marked = {item.nodeid for item in session.items if item.get_closest_marker("thorough")}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcome["running"] = nodeid
        self._write()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            late = "Timeout (>" in str(report.longrepr)
            self._outcome["failed"].setdefault(report.nodeid, "timeout" if late else "failed")
            if report.nodeid in self._marked:
                self._outcome["thorough"].append(report.nodeid)
        elif report.when == "call":
            self._outcome["passed"] += report.passed
        self._write()


def _become(tree: Path, log: Path) -> None:
    """In the fork: what a new process would be, started in the copy."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    os.dup2(1, 2)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.chdir(tree)
    first = [str(tree / "src"), str(tree)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    elsewhere = {"", str(ROOT), str(ROOT / "src")}
    sys.path[:] = [*first, *(path for path in sys.path if path not in elsewhere)]
    sys.dont_write_bytecode = False
    sys.argv[:] = ["pytest"]
    importlib.invalidate_caches()
    _let_properties_end_at_once()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPATH"] = os.pathsep.join(first)
    os.environ["TMPDIR"] = str(tree / "temporary")
    (tree / "temporary").mkdir(exist_ok=True)
    tempfile.tempdir = None


def _let_properties_end_at_once() -> None:
    """Have hypothesis report the first example that fails: to find the smallest takes minutes, and tells nothing."""
    from hypothesis import Phase, settings

    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("first failure", phases=phases, derandomize=True, print_blob=False)
    settings.load_profile("first failure")  # the profiles that the tests register go on from it
