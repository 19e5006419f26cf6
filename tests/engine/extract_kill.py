"""`extract` on a real engine, killed (SIGKILL) again and again; the end must equal an uninterrupted run, row for row.

    python -m tests.engine.extract_kill [--kills 20] [--seed 0] [--records 600]

Moments are random: some while the engine starts, most while it reads and writes. When a run gets to its end it is
compared, and the next begins in a new place.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.extracting import differences, texts, worst_difference, write_jsonl
from tests.support.measure import eventually, patience
from tests.support.zygote import ROOT, zygote

ENGINE = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 256}
BOUND = 1e-5
"""Rows of other batches: CPU kernels choose their blocks by the batch's size, so last bits differ."""


def child(source: str, out: str) -> None:
    """One run; says when its engine is there."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    import vllm_weir as weir
    from vllm_weir.extraction.engine import VllmEngine

    def start(wanted: Any) -> VllmEngine:
        engine = VllmEngine(wanted)
        print("started", flush=True)
        return engine

    weir.extract(
        source, weir.demo_model(), out, layers=[1, 4], engine=ENGINE, batch=8, flush_seconds=0.0,
        shard_bytes=200_000, start_engine=start,
    )  # fmt: skip


def run(source: Path, out: Path, rng: random.Random | None) -> bool:
    """Run in a process of its own; with `rng` it is killed at a random moment. Returns whether it got to its end."""
    log = out.parent / f"{out.name}.log"
    said = log.with_suffix(".out")
    program = ["-m", "tests.engine.extract_kill", "child", str(source), str(out)]
    process = zygote().start(program, os.environ, ROOT, said, log)
    try:
        if rng is None:
            assert process.wait(patience(300)) == 0, log.read_text()[-5000:]
            return True
        if rng.random() < 0.15:
            time.sleep(rng.uniform(0, 3))
        else:
            # vLLM logs there, too.
            eventually(lambda: process.poll() is not None or "started" in said.read_text().split("\n"), True, 300)
            if (ended := process.poll()) is not None:  # the one before was killed when all was written: needs no engine
                assert ended == 0, log.read_text()[-5000:]
                return True
            time.sleep(rng.uniform(0, 2))
        return process.poll() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def trial(folder: Path, kills: int, seed: int, records: int) -> dict[str, Any]:
    """All of it; raises AssertionError if a dataset is not the uninterrupted one."""
    from vllm_weir.storage import load

    source = write_jsonl(folder / "texts.jsonl", texts(records, seed))
    assert run(source, folder / "whole", None)
    whole = load(folder / "whole")
    rng, done, rounds, worst, held = random.Random(seed), 0, 0, 0.0, []
    while done < kills:
        out = folder / f"killed-{rounds}"
        while done < kills and not run(source, out, rng):
            done += 1
            held.append(len(load(out)) if (out / "weir.json").exists() else 0)
        run(source, out, None)
        found = load(out)
        assert differences(found, whole, BOUND) == []
        worst, rounds = max(worst, worst_difference(found, whole)), rounds + 1
    return {
        "kills": done, "rounds": rounds, "records": records, "rows": whole.count(), "held_after_each_kill": held,
        "max_difference": worst, "bound": BOUND,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", type=int, default=600)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weir-kill-") as folder:
        print(json.dumps(trial(Path(folder), options.kills, options.seed, options.records), indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:])
    else:
        main()
