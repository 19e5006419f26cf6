"""The setting `ship` under tensor parallelism: one rank sends all rows, or each its share; prints ms and GB/s.

python tests/gpu/ship.py [--tp 2] [--ship first]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--ship", default="first")
    given = parser.parse_args()
    from vllm import LLM, SamplingParams

    import vllm_weir as weir
    from vllm_weir.bench.weights import make_model

    llm = LLM(
        make_model(Path(tempfile.mkdtemp())), load_format="dummy", dtype="bfloat16", max_model_len=2048,
        skip_tokenizer_init=True, seed=0, gpu_memory_utilization=0.6, enable_prefix_caching=False,
        max_num_batched_tokens=8192, tensor_parallel_size=given.tp,
        additional_config={"weir": {"host_bytes": 32 << 30, "ship": given.ship}},
    )  # fmt: skip
    for name, count, length, tokens in (("decode", 32, 16, 128), ("decode", 256, 16, 128), ("prefill", 64, 1024, 1)):
        base = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": [10 + (k * 7 + i) % 900 for i in range(length)]} for k in range(count)]
        for case, params in (("idle", base), ("all", weir.params(base, capture=weir.Capture("resid_post")))):
            seconds = []
            for turn in range(7):
                before = time.perf_counter()
                outs = llm.generate(prompts, params, use_tqdm=False)
                rows = [len(o.activations[s]) for o in outs for s in o.activations.sites] if case == "all" else []
                if turn >= 3:
                    seconds.append(time.perf_counter() - before)
                del outs
            median = statistics.median(seconds)
            print(
                f"ship={given.ship} tp={given.tp} {name} {count}x{length}, {case}: {1e3 * median:.1f} ms "
                f"({1e3 * min(seconds):.1f}-{1e3 * max(seconds):.1f}), {sum(rows) * 8192 / median / 1e9:.1f} GB/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
