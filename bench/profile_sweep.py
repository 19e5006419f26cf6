"""Where the time of a sweep goes: a sampling profile of the caller's process and of the engine's.

PYTHONPATH=src python3 bench/profile_sweep.py --out bench/results/profile_sweep_h100.json
PYTHONPATH=src python3 bench/profile_sweep.py --small          # a small model, also on a CPU

The cells are those of `bench/sweep.py`, the profile that of `bench/sampler.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "fork"
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")

import sampler
import sweep as cells


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
            sampler.start()
            weir.llm.collective_rpc(sampler.start)
        begin = time.perf_counter()
        weir.sweep(clean, corrupt, list(cells.HOOKS))
        found["seconds"].append(round(time.perf_counter() - begin, 3))
    (found["engine"],) = weir.llm.collective_rpc(sampler.stop)
    found["caller"] = sampler.stop()
    for process in ("caller", "engine"):
        print(f"\n{process}: {sampler.table(found[process])}")
    print(f"\nseconds, the last with the profile: {found['seconds']}")
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
