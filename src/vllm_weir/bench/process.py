"""A system's process as the measuring process sees it: it is asked, waited for with a limit, and ended."""

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
from pathlib import Path
from typing import Any

from vllm_weir.bench.plan import BenchPlan
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
