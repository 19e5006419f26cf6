"""Token rate of `weir extract` to shards on a local disk, beside plain requests for the same prompts.

PYTHONPATH=src python3 bench/extract.py --out bench/results/extract_h100.json
PYTHONPATH=src python3 bench/extract.py --small        # a few texts on a small model, also on a CPU

One engine (Llama-3.1-8B shapes, random weights) does both in turn: a repeat is all texts in one call of `generate`
with one token each, and then all texts through `weir.extract`, which reads them from a file, tokenises them, captures
every prompt token of some blocks and writes it. Plain requests on this engine take what they take on stock vLLM
(docs/bench.md). Prompts are never in the prefix cache.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

SMALL = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 2000, "torch_dtype": "float32", "rope_scaling": None,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""What differs from the 8B shapes."""
WORDS = 1000


def engine_of(llm: Any) -> Any:
    """Return what `weir.extract` starts its engine with: this one, which stays."""
    import vllm

    from vllm_weir.extraction.engine import VllmEngine

    class Kept(VllmEngine):
        def close(self) -> None:
            """The next run needs it."""

    def start(spec: Any) -> Any:
        with mock.patch.object(vllm, "LLM", lambda **_: llm):
            return Kept(spec)

    return start


def run(given: argparse.Namespace, work: Path) -> Iterator[dict[str, Any]]:
    """Yield, after each repeat, what those so far have given."""
    from vllm import LLM, SamplingParams

    import vllm_weir as weir
    from vllm_weir.bench.reference import LLAMA_8B, add_tokenizer, make_model

    config = LLAMA_8B | (SMALL if given.small else {})
    model = make_model(work / "model", config)
    add_tokenizer(model, WORDS)
    options: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": 256 << 20} if given.small else {}
    llm = LLM(model, load_format="dummy", max_model_len=1024, enable_prefix_caching=False, seed=0, **options)
    draw = random.Random(0)
    lengths = [draw.randint(50, 60 if given.small else 600) for _ in range(given.texts)]
    ids = [[draw.randrange(1, WORDS) for _ in range(n)] for n in lengths]
    (work / "texts.jsonl").write_text(
        "".join(json.dumps({"text": " ".join(f"w{i}" for i in one)}) + "\n" for one in ids)
    )
    prompts = [{"prompt_token_ids": one} for one in ids]
    layers = {n: list(range(0, config["num_hidden_layers"], config["num_hidden_layers"] // n)) for n in given.blocks}
    rates: dict[str, list[float]] = {"plain": [], **{f"extract, blocks: {n}": [] for n in given.blocks}}
    for repeat in range(given.repeats + 1):  # the first does not count
        began = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        rates["plain"].append(sum(lengths) / (time.perf_counter() - began))
        for n in given.blocks:
            target = work / f"acts{n}"
            began = time.perf_counter()
            done = weir.extract(
                str(work / "texts.jsonl"), model, str(target), layers=layers[n], start_engine=engine_of(llm)
            )
            rates[f"extract, blocks: {n}"].append(sum(lengths) / (time.perf_counter() - began))
            assert done.requests == given.texts and done.rows == n * sum(lengths), done
            shutil.rmtree(target)
        print({name: round(of[-1]) for name, of in rates.items()}, "" if repeat else "(does not count)", flush=True)
        if repeat:
            yield report(given, lengths, rates)
    llm.llm_engine.engine_core.shutdown()  # else the process waits for the engine's at its end


def report(given: argparse.Namespace, lengths: list[int], rates: dict[str, list[float]]) -> dict[str, Any]:
    plain = statistics.median(rates["plain"][1:])
    rows = {
        name: {
            "tokens/s": round(statistics.median(of[1:])),
            "of plain": round(statistics.median(of[1:]) / plain, 3),
            "least": round(min(of[1:]) / plain, 3),
            "most": round(max(of[1:]) / plain, 3),
        }
        for name, of in rates.items()
    }
    return {
        "model": "small" if given.small else "llama-8b shapes",
        "texts": given.texts,
        "tokens": sum(lengths),
        "repeats": len(rates["plain"]) - 1,
        **rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=1500)
    parser.add_argument("--blocks", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--folder", type=Path, help="where the shards are written and deleted again")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for found in run(given, Path(folder)):
            if given.out:
                given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
