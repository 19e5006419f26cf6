"""A system's process as the measuring process sees it: it is asked, waited for within limits, and ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_weir.bench.plan import BenchPlan, BenchTask
from vllm_weir.bench.result import CaseResult, summarise
from vllm_weir.bench.systems import known_systems


class WorkerTimeout(Exception):
    """A worker process gave no answer within the limit."""


class WorkerExited(Exception):
    """A worker process has ended."""


class WorkerProcess:
    """One worker process, in a session of its own."""

    def __init__(self, system: str, plan: BenchPlan, workdir: Path) -> None:
        self.system = system
        self.workdir = Path(tempfile.mkdtemp(prefix=f"{system}-", dir=workdir))
        memory = Path("/dev/shm")
        # Files in memory: what native writes should not wait for a disk.
        self.scratch = Path(tempfile.mkdtemp(prefix="weir-bench-", dir=memory if memory.is_dir() else self.workdir))
        path = self.workdir / "plan.json"
        path.write_text(plan.model_dump_json())
        self.log = self.workdir / "log.txt"
        self._log = self.log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm_weir.bench.worker", str(path), system, str(self.scratch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=self._environ(plan),
            start_new_session=True,
        )
        self._asked_at = 0
        self._answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _environ(self, plan: BenchPlan) -> dict[str, str]:
        out = dict(os.environ) | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        if plan.cold:
            names = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
            out |= {variable: str(self.workdir / "cache" / name) for variable, name in names.items()}
        out.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        if plan.dummy:  # a function is sent to the engine's process: `fill_engine`
            out["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        return out | known_systems()[self.system].environ(plan)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def ask(self, seconds: float, do: str, **what: Any) -> dict[str, Any]:
        """Return the answer to a command: a public method of `ServedEngine`, with its arguments."""
        assert self.process.stdin is not None
        self._asked_at = self.log.stat().st_size
        try:
            self.process.stdin.write(json.dumps({"do": do, **what}) + "\n")
            self.process.stdin.flush()
            line = self._wait(seconds)
        except (BrokenPipeError, ValueError):
            line = None
        if line is None:
            raise WorkerExited(f"its process ended: {self.last_words()}")
        return json.loads(line)

    def _wait(self, seconds: float) -> str | None:
        until = time.monotonic() + seconds
        while True:
            try:
                return self._answers.get(timeout=max(0.01, min(1.0, until - time.monotonic())))
            except queue.Empty:
                # A child that outlives the process keeps the pipe open.
                if self.process.poll() is not None and self._answers.empty():
                    return None
                if time.monotonic() >= until:
                    raise WorkerTimeout(f"no answer within {seconds:.0f} s") from None

    def last_words(self) -> str:
        return " | ".join(self._logged(0)[-3:])[-400:]

    def last_error(self) -> str | None:
        lines = [line for line in self._logged(self._asked_at) if "Error" in line]
        return re.sub(r"^\(\w+ pid=\d+\) ", "", lines[-1])[:300] if lines else None

    def _logged(self, start: int) -> list[str]:
        text = self.log.read_bytes()[start:].decode(errors="replace")
        return [line.strip() for line in text.splitlines() if line.strip()]

    def close(self, patience: float = 20.0) -> None:
        """End the process and all that it started; it may be called again."""
        with contextlib.suppress(OSError, ValueError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        self._end_group()
        self._log.close()
        shutil.rmtree(self.scratch, ignore_errors=True)
        shutil.rmtree(self.workdir / "cache", ignore_errors=True)

    def _end_group(self) -> None:
        # The engine's processes are of its session; memory of the device is free only once they are gone.
        until = time.monotonic() + 10
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
            while time.monotonic() < until:
                os.killpg(self.process.pid, 0)
                time.sleep(0.1)


@dataclass(frozen=True)
class Deadlines:
    """The seconds that a case, and the whole run, may take."""

    case: float  # seconds of a case, warm-ups included
    run: float | None  # seconds of the whole run; None: no limit
    started: float  # when the run started, in seconds of `time.monotonic`

    @classmethod
    def starting_now(cls, plan: BenchPlan) -> Deadlines:
        return cls(plan.case_seconds, plan.run_seconds, time.monotonic())

    def left_of_run(self) -> float:
        """Return the seconds left of the run; infinity without a limit."""
        return float("inf") if self.run is None else self.started + self.run - time.monotonic()

    def left(self, times: TaskTimes) -> float:
        return min(self.case - times.spent(), self.left_of_run())

    def end(self, times: TaskTimes, why: str, more: str = "") -> None:
        """End a case because of the nearer limit; one that the run's limit cuts off says nothing of its system."""
        if self.case - times.spent() <= self.left_of_run():
            times.close(f"{why}: the limit is {self.case:.0f} s a case{more}", late=True)
        else:
            unmeasured = "" if times.timed else "not measured, "
            times.close(f"{unmeasured}{why}: the limit is {self.run:.0f} s a run{more}")


@dataclass
class TaskTimes:
    """The runs of a task so far."""

    task: BenchTask
    warm: list[float] = field(default_factory=list)  # seconds of the warm-ups
    timed: list[float] = field(default_factory=list)  # seconds of the timed runs
    # seconds of the first call of the task's case in its engine; None where it was not the first
    first: float | None = None
    note: str | None = None  # why there are fewer runs than planned, or none
    closed: bool = False  # whether there are no more runs
    late: bool = False  # whether the case ran out of its own time
    lost: float = 0.0  # seconds of a run that was not waited for
    graphs: int = 0  # CUDA graphs that were captured in the timed runs

    def spent(self) -> float:
        return sum(self.warm) + sum(self.timed) + self.lost

    def close(self, note: str, late: bool = False) -> None:
        self.note, self.closed, self.late = note, True, late

    def result(self) -> CaseResult:
        """Return the figures of the runs: milliseconds, or thousand tokens a second."""
        captured = f"{self.graphs} CUDA graphs were captured in the timed runs" if self.graphs else None
        note = "; ".join(filter(None, [self.note, captured])) or None
        figure = self.task.size.figure
        return summarise(
            self.task, [figure(s) for s in self.timed], note, None if self.first is None else figure(self.first)
        )
