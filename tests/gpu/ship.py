"""The setting `ship` under tensor parallelism: one rank sends all rows, or each its share; prints ms and GB/s.

python tests/gpu/ship.py [--tp 2] [--ship first] [--out FILE]

The shapes are Llama-3.1-8B's; every row is in the caller's hands as a tensor when the clock stops. What FILE has of
other settings of `ship` stays.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

SIZES = (("decode", 32, 16, 128), ("decode", 256, 16, 128), ("prefill", 64, 1024, 1))
"""Kind, prompts, their tokens, generated tokens."""
WARM, TURNS = 2, 5
"""Calls that are not timed (live graphs are captured and host memory is pinned in them), and those that are."""


def measure(llm: Any, params: Any, prompts: list[dict[str, list[int]]], captures: bool) -> tuple[list[float], int]:
    """Seconds of every timed call, and rows of the last."""
    seconds, rows = [], 0
    for turn in range(WARM + TURNS):
        before = time.perf_counter()
        outs = llm.generate(prompts, params, use_tqdm=False)
        taken = [o.activations[s] for o in outs for s in o.activations.sites] if captures else []
        if turn >= WARM:
            seconds.append(time.perf_counter() - before)
        rows = sum(map(len, taken))
        del outs, taken
    return seconds, rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--ship", default="first", choices=("first", "split"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ["WEIR_SHIP"] = given.ship  # not an engine's argument: what another start has compiled serves this one
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    import vllm_weir as weir
    from vllm_weir.bench.reference import make_model

    llm = LLM(
        make_model(Path(tempfile.mkdtemp())), load_format="dummy", dtype="bfloat16", max_model_len=2048,
        skip_tokenizer_init=True, seed=0, gpu_memory_utilization=0.6, enable_prefix_caching=False,
        max_num_batched_tokens=8192, tensor_parallel_size=given.tp,
        additional_config={"weir": {"host_bytes": 32 << 30}},
        compilation_config={"cudagraph_capture_sizes": [32, 256]},
    )  # fmt: skip
    device = {"device": torch.cuda.get_device_name(), "vllm": vllm.__version__, "torch": torch.__version__}
    about = device | {"tp": given.tp}
    cases: list[dict[str, Any]] = []
    for kind, count, length, tokens in SIZES:
        size = f"{kind} {count}x{length}"
        base = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": [10 + (k * 7 + i) % 900 for i in range(length)]} for k in range(count)]
        for case, params in (("idle", base), ("all", weir.params(base, capture=weir.Capture("resid_post")))):
            seconds, rows = measure(llm, params, prompts, case == "all")
            ms = [round(1e3 * s, 1) for s in seconds]
            found = {"size": size, "case": case, "median_ms": statistics.median(ms), "samples": ms, "rows": rows}
            cases.append(found | {"gb_s": round(rows * 8192 / statistics.median(seconds) / 1e9, 2)})
            print(f"ship={given.ship}", cases[-1], flush=True)
            if given.out:
                kept = json.loads(given.out.read_text()) if given.out.exists() else about
                given.out.write_text(json.dumps(kept | {given.ship: cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
