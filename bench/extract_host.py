"""What `weir extract` costs on the host, without a GPU or a model: its code around an engine that computes nothing.

PYTHONPATH=src python3 bench/extract_host.py --out bench/results/extract_host_cpu.json

Texts of 50 to 600 tokens are read from a file, tokenised and handed to a stand-in for the engine, whose rows (bfloat16,
4096 wide, of 1 or 4 blocks, one block beside the other as a worker leaves them) are ready in memory. `flat out` it
answers at once, which gives the rate of everything else. `paced` it takes as long as an engine of so many tokens per
second that computes its requests in order, and stands still while it has none; `of the engine` is what remains of that
rate. `caller busy` is the CPU time of the thread that steps the engine, as a share of the time that the paced engine
takes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from extract import WORDS
from transformers import AutoTokenizer

import vllm_weir as weir
from vllm_weir.bench.reference import add_tokenizer
from vllm_weir.extraction.engine import PIECES_AHEAD, PromptRows
from vllm_weir.storage import Batch

WIDTH, LONGEST = 4096, 600
POOL_TOKENS = 16_384


class StandIn:
    """An engine whose rows are ready.

    Args:
        folder: where its tokenizer is.
        blocks: blocks whose rows every token gives.
        rate: tokens per second; 0 answers at once.
    """

    limit = LONGEST
    weights = None

    def __init__(self, folder: str, blocks: int, rate: float) -> None:
        self.tokenizer, self.blocks, self.rate = AutoTokenizer.from_pretrained(folder), blocks, rate
        self.row_bytes = blocks * WIDTH * 2
        draw = torch.Generator().manual_seed(0)
        shape = (POOL_TOKENS + LONGEST, blocks, WIDTH)
        self.pool = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=draw).view(torch.bfloat16)
        self._next, self._free_at = 0, 0.0

    def encode(self, values: Sequence[str]) -> list[list[int]]:
        return self.tokenizer(list(values))["input_ids"] if values else []

    def read(self, prompts: Sequence[list[int]]) -> list[PromptRows]:
        self._wait(self._submit(prompts))
        return [self._rows(ids) for ids in prompts]

    def read_ahead(self, pieces: Iterable[Sequence[list[int]]]) -> Iterator[list[PromptRows]]:
        waiting, under_way = iter(pieces), deque()
        while True:
            while len(under_way) < PIECES_AHEAD and (piece := next(waiting, None)) is not None:
                under_way.append((piece, self._submit(piece)))
            if not under_way:
                return
            piece, done_at = under_way.popleft()
            self._wait(done_at)
            yield [self._rows(ids) for ids in piece]

    def _submit(self, prompts: Sequence[list[int]]) -> float:
        """Return when the engine will have computed these prompts, after those that it has."""
        if self.rate:
            self._free_at = max(self._free_at, time.perf_counter()) + sum(map(len, prompts)) / self.rate
        return self._free_at

    def _wait(self, until: float) -> None:
        time.sleep(max(0.0, until - time.perf_counter()))

    def _rows(self, ids: list[int]) -> PromptRows:
        self._next = (self._next + len(ids)) % POOL_TOKENS
        rows = self.pool[self._next : self._next + len(ids)]
        at, tokens = torch.arange(len(ids)), torch.tensor(ids)
        batches = [Batch("", "resid_post", k, at, tokens, rows[:, k]) for k in range(self.blocks)]
        return PromptRows(batches, len(ids), 1, "length")

    def close(self) -> None:
        pass


def run_once(given: argparse.Namespace, work: Path, engine: StandIn, tokens: int) -> dict[str, float]:
    """Run `extract` once, and return its rates."""
    target = work / "acts"
    cpu, began = time.thread_time(), time.perf_counter()
    done = weir.extract(
        str(work / "texts.jsonl"), "stand-in", str(target), layers=list(range(engine.blocks)),
        start_engine=lambda spec: engine,
    )  # fmt: skip
    seconds, cpu = time.perf_counter() - began, time.thread_time() - cpu
    assert done.requests == given.texts and done.rows == engine.blocks * tokens, done
    shutil.rmtree(target)
    return {"MB/s": done.bytes / 1e6 / seconds, "tokens/s": tokens / seconds, "caller busy": cpu * given.rate / tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--rate", type=float, default=44_500.0, help="tokens per second of the paced engine; 0: none")
    parser.add_argument("--blocks", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the shards are written and deleted again")
    parser.add_argument("--label", default="now", help="name of the results in the file")
    parser.add_argument("--out", type=Path, help="results of other labels in it stay")
    given = parser.parse_args()
    draw, found = random.Random(0), {}
    ids = [[draw.randrange(1, WORDS) for _ in range(draw.randint(50, LONGEST))] for _ in range(given.texts)]
    tokens = sum(map(len, ids))
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        work = Path(folder)
        add_tokenizer(str(work / "tokenizer"), WORDS)
        lines = (json.dumps({"text": " ".join(f"w{i}" for i in one)}) + "\n" for one in ids)
        (work / "texts.jsonl").write_text("".join(lines))
        for blocks in given.blocks:
            for name, rate in [("flat out", 0.0)] + [("paced", given.rate)] * bool(given.rate):
                engine = StandIn(str(work / "tokenizer"), blocks, rate)
                runs = [run_once(given, work, engine, tokens) for _ in range(given.repeats + 1)][1:]
                row = {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}
                if rate:
                    row["of the engine"] = round(row["tokens/s"] / rate, 3)
                row["all MB/s"] = [round(run["MB/s"]) for run in runs]
                found[f"blocks: {blocks}, {name}"] = row
                print(f"blocks: {blocks}, {name}", json.dumps(row), flush=True)
    if given.out:
        before = json.loads(given.out.read_text()) if given.out.exists() else {}
        machine = {"cores": os.cpu_count(), "torch": torch.__version__, "numpy": np.__version__}
        result = {"texts": given.texts, "tokens": tokens, "paced tokens/s": given.rate, **machine, **found}
        given.out.write_text(json.dumps({**before, given.label: result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
