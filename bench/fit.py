"""How long `weir.fit` takes on an engine that runs: 1,000 pairs, all blocks of Llama-3.1-8B's shapes, dummy weights.

    python bench/fit.py [--small] [--pairs 1000] [--tokens 32] [--methods diff pca logistic] [--out FILE]

The directions of a model without training mean nothing; the work is the same. The engine's start is not counted.
`--small` takes a tiny model, for a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
TARGET = 60.0
"""Seconds."""


def engine(folder: Path, small: bool) -> Any:
    """Start an engine of dummy weights."""
    from vllm import LLM

    (folder / "config.json").write_text(json.dumps(LLAMA_8B | (SMALL if small else {})))
    options: dict[str, Any] = {"max_model_len": 512, "load_format": "dummy", "skip_tokenizer_init": True, "seed": 0}
    if small:
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "dtype": "float32"}
    return LLM(str(folder), **options)


def prompts(pairs: int, tokens: int, vocabulary: int) -> tuple[list[list[int]], list[list[int]]]:
    """Pairs of prompts that differ in one token in eight."""
    rng = np.random.default_rng(0)
    positive = rng.integers(10, vocabulary, (pairs, tokens))
    negative = np.where(rng.random((pairs, tokens)) < 1 / 8, rng.integers(10, vocabulary, (pairs, tokens)), positive)
    return positive.tolist(), negative.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--methods", nargs="+", default=["diff", "pca", "lat", "logistic"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import vllm

    import vllm_weir as weir

    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        llm = engine(Path(folder), args.small)
        started = time.perf_counter() - begin
        vocabulary = (SMALL if args.small else LLAMA_8B)["vocab_size"]
        positive, negative = prompts(args.pairs, args.tokens, vocabulary)
        weir.fit(llm, positive[:8], negative[:8], progress=False)  # a warm-up
        seconds = {}
        for method in args.methods:
            llm.reset_prefix_cache()
            begin = time.perf_counter()
            found = weir.fit(llm, positive, negative, method, progress=False)
            seconds[method] = time.perf_counter() - begin
            verdict = "meets" if seconds[method] < TARGET else "MISSES"
            took = f"{seconds[method]:.1f} s, {verdict} {TARGET:g} s"
            print(f"{method}: {args.pairs} pairs, {len(found.layers)} blocks, {took}")
    result = {
        "what": "weir.fit, seconds after the start of the engine, with the causal check",
        "model": "small" if args.small else "Llama-3.1-8B's shapes, dummy weights, bf16",
        "pairs": args.pairs, "tokens": args.tokens, "seconds": seconds, "start": started, "target": TARGET,
        "vllm": vllm.__version__, "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
