"""A sampling profile of a process, all of its threads: where they are, and what each takes of a processor.

A thread reads the stacks of all others every two milliseconds, which makes them a little slower. It can do so only
when the interpreter's lock is free, so a thread that computes shows up where it gives that lock away (reading a queue,
sending a message): which thread is busy is told by processor time, not by samples.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PERIOD = 0.002
"""Seconds between two samples."""
ROWS = 90
"""Functions of each thread in the report."""


RUNNING: list[Sampler] = []
"""The one of this process, if it is being sampled."""


class Sampler:
    """Reads the stacks of all threads of its process until it is stopped."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self.samples, self.within, self.own = 0, defaultdict[str, Counter[str]](Counter), Counter[tuple[str, str]]()
        self._began, self._cpu = time.perf_counter(), cpu_seconds()
        self._reader = threading.Thread(target=self._read, daemon=True, name="sampler")
        self._reader.start()

    def _read(self) -> None:
        while not self._stopped.wait(PERIOD):
            threads = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, top in sys._current_frames().items():
                thread, frame, names = threads.get(ident, "?"), top, set()
                while frame is not None:
                    names.add(label(frame))
                    frame = frame.f_back
                self.own[thread, label(top)] += 1
                self.within[thread].update(names)
            self.samples += 1

    def stop(self) -> dict[str, Any]:
        """Each thread's processor seconds, and the shares of the functions that were on its stack most often."""
        self._stopped.set()
        self._reader.join()
        found: dict[str, Any] = {"samples": self.samples, "seconds": round(time.perf_counter() - self._began, 3)}
        for thread, seconds in cpu_seconds().items():
            share = {n: round(c / self.samples, 4) for n, c in self.within[thread].most_common(ROWS)}
            own = {n: round(c / self.samples, 4) for (t, n), c in self.own.most_common() if t == thread}
            cpu = round(seconds - self._cpu.get(thread, 0.0), 3)
            if cpu > 0.02 and thread != "sampler":
                found[thread] = {"cpu_seconds": cpu, "share": share, "own": dict(list(own.items())[: ROWS // 2])}
        return found


def cpu_seconds() -> dict[str, float]:
    """Processor seconds of each thread that Python knows, by name, and of all others together."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, float] = defaultdict(float)
    for path in Path("/proc/self/task").iterdir():
        fields = (path / "stat").read_text().rsplit(")", 1)[1].split()
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        found[names.get(int(path.name), "not Python's")] += seconds
    return dict(found)


def label(frame: Any) -> str:
    """A function as `package/file.py:name`."""
    code = frame.f_code
    return f"{'/'.join(Path(code.co_filename).parts[-3:])}:{code.co_name}"


def start(_worker: Any = None) -> None:
    """Begin to sample this process."""
    RUNNING.append(Sampler())


def stop(_worker: Any = None) -> dict[str, Any]:
    """Return what was sampled in this process."""
    return RUNNING.pop().stop()


def table(profile: Mapping[str, Any], rows: int = ROWS) -> str:
    """A process's profile as lines of text, the functions that are on the stack most often first."""
    lines = [f"{profile['samples']} samples in {profile['seconds']} s"]
    for thread, of in profile.items():
        if isinstance(of, Mapping):
            lines.append(f" {thread}: {of['cpu_seconds']} s of a processor")
            lines += [f"  {share:7.1%}  {name}" for name, share in list(of["share"].items())[:rows]]
    return "\n".join(lines)
