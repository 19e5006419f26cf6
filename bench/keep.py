"""How fast the `sharded` layout writes beside `dd` to the same disk, and how soon the first of a million rows is there.

    python bench/keep.py [DIRECTORY] [--megabytes 1024] [--repeats 5] [--out bench/results/keep.json]

`dd` copies random bytes from memory (/dev/shm) in blocks of 1 MiB, once to the page cache and once with ``conv=fsync``;
the writer writes as many bytes with ``fsync=False`` and ``True``. They take turns, each on a disk that has nothing
left to write, and medians are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_weir.storage import Batch, load, open_writer

D, LAYERS = 4096, 32


def dd(source: Path, path: Path, megabytes: int, sync: bool) -> float:
    """Seconds that dd takes."""
    command = ["dd", f"if={source}", f"of={path}", "bs=1M", f"count={megabytes}", "status=none"]
    os.sync()
    begin = time.perf_counter()
    subprocess.run([*command, "conv=fsync"] if sync else command, check=True)
    return time.perf_counter() - begin


def sharded(path: Path, megabytes: int, sync: bool, tokens: int) -> float:
    """Seconds to write as many bytes: bfloat16 rows of 32 layers, in requests of `tokens` tokens, all published."""
    rows = torch.randn(tokens, D).bfloat16()
    positions, ids = np.arange(tokens), np.arange(tokens)
    requests = max(1, megabytes * 2**20 // (rows.nbytes * LAYERS))
    os.sync()
    begin = time.perf_counter()
    with open_writer(path, "sharded", fsync=sync) as writer:
        for i in range(requests):
            for layer in range(LAYERS):
                writer.write(Batch(f"request-{i}", "resid_post", layer, positions, ids, rows))
            writer.finish_request(f"request-{i}")
    took = time.perf_counter() - begin
    return took * megabytes * 2**20 / (requests * LAYERS * rows.nbytes)


def first_row(path: Path, requests: int = 2000, tokens: int = 500, d: int = 16) -> dict[str, float]:
    """Seconds to open a dataset of requests x tokens rows, and to the first shuffled batch of 64."""
    if not path.exists():
        rows = torch.randn(tokens, d)
        with open_writer(path) as writer:
            for i in range(requests):
                writer.write(Batch(f"request-{i}", "resid_post", 0, np.arange(tokens), np.arange(tokens), rows))
                writer.finish_request(f"request-{i}")
    begin = time.perf_counter()
    dataset = load(path)
    opened = time.perf_counter()
    next(iter(dataset["request-7"].values()))
    row = time.perf_counter()
    next(iter(dataset.torch(("resid_post", 0), batch_size=64, buffer_rows=4096)))
    shuffled = time.perf_counter()
    seconds = {"open_s": opened, "first_row_s": row, "first_shuffled_batch_s": shuffled}
    return {"rows": dataset.count()} | {name: then - begin for name, then in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("bench/results/keep.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weir-keep-", dir=options.directory) as work:
        result = measure(Path(work), options.megabytes, options.repeats)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for case in result["write"]:
        print(
            f"sharded, {case['tokens']} tokens a request, {'fsync' if case['fsync'] else 'page cache'}: "
            f"{case['sharded_mb_s']:,.0f} MB/s, dd {case['dd_mb_s']:,.0f} MB/s, ratio {case['ratio']:.2f}"
        )
    load_ = result["load"]
    print(
        f"{load_['rows']:,} rows: open {load_['open_s']:.3f} s, first row {load_['first_row_s']:.3f} s, first shuffled "
        f"batch {load_['first_shuffled_batch_s']:.3f} s"
    )


def measure(work: Path, megabytes: int, repeats: int) -> dict[str, Any]:
    """All figures: medians, and every run."""
    source = Path("/dev/shm") / f"weir-keep-{os.getpid()}"
    source.write_bytes(os.urandom(megabytes * 2**20))
    try:
        cases = _cases(source, work, megabytes, repeats)
    finally:
        source.unlink()
    loads = [first_row(work / "rows") for _ in range(repeats)]
    medians = {key: statistics.median(run[key] for run in loads) for key in loads[0]}
    return {"machine": platform.processor() or platform.machine(), "write": cases, "load": medians, "loads": loads}


def _cases(source: Path, work: Path, megabytes: int, repeats: int) -> list[dict[str, Any]]:
    cases = []
    for sync in (True, False):
        for tokens in (512, 16):
            runs: dict[str, list[float]] = {"dd": [], "sharded": []}
            for i in range(repeats + 1):
                for name in ("dd", "sharded") if i % 2 else ("sharded", "dd"):
                    target = work / name
                    one = (
                        dd(source, target, megabytes, sync)
                        if name == "dd"
                        else sharded(target, megabytes, sync, tokens)
                    )
                    shutil.rmtree(target) if target.is_dir() else target.unlink()
                    if i:  # the first is a warm-up
                        runs[name].append(one)
            speed = {name: megabytes * 2**20 / 1e6 / statistics.median(times) for name, times in runs.items()}
            cases.append(
                {"fsync": sync, "tokens": tokens, "megabytes": megabytes, "dd_mb_s": speed["dd"],
                 "sharded_mb_s": speed["sharded"], "ratio": speed["sharded"] / speed["dd"], "seconds": runs}
            )  # fmt: skip
    return cases


if __name__ == "__main__":
    main()
