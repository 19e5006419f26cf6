"""Where the time of a sweep goes: a sampling profile of the caller's process and of the engine's.

PYTHONPATH=src python3 bench/profile_sweep.py --out bench/results/profile_sweep_h100.json
PYTHONPATH=src python3 bench/profile_sweep.py --small          # a small model, also on a CPU

The cells are those of `bench/sweep.py`. A thread in each process reads the stacks of all threads every two
milliseconds, which makes both a little slower. A function's share is that of the samples in which it is on the stack;
`own` those in which it is on top. Waiting of a process shows up as the function in which it waits.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "fork"
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")

import sweep as cells

PERIOD = 0.002
"""Seconds between two samples."""
ROWS = 90
"""Functions of each thread in the report."""


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
    import profile_sweep

    profile_sweep.SAMPLER = profile_sweep.Sampler()


def stop(_worker: Any = None) -> dict[str, Any]:
    """What was sampled in this process."""
    import profile_sweep

    return profile_sweep.SAMPLER.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--shapes", choices=cells.SHAPES, default="0.6b", help="Qwen3's")
    parser.add_argument("--positions", type=int, default=68)
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--batched-tokens", type=int, default=16384)
    parser.add_argument("--memory", type=float, default=0.6, help="vLLM's gpu_memory_utilization")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    weir = cells.Weir(cells.SMALL if given.small else cells.SHAPES[given.shapes], given)
    clean, corrupt = cells.prompts(given.positions)
    found: dict[str, Any] = {"seconds": []}
    for repeat in range(4):
        weir.prepare()
        if repeat == 3:
            start()
            weir.llm.collective_rpc(start)
        begin = time.perf_counter()
        weir.sweep(clean, corrupt, list(cells.HOOKS))
        found["seconds"].append(round(time.perf_counter() - begin, 3))
    (found["engine"],) = weir.llm.collective_rpc(stop)
    found["caller"] = stop()
    for process in ("caller", "engine"):
        print(f"\n{process}: {found[process]['samples']} samples in {found[process]['seconds']} s")
        for thread, of in found[process].items():
            if not isinstance(of, dict):
                continue
            print(f" {thread}: {of['cpu_seconds']} s of a processor")
            for name, share in of["share"].items():
                print(f"  {share:7.1%}  {name}")
    print(f"\nseconds, the last with the profile: {found['seconds']}")
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    import profile_sweep

    profile_sweep.main()
