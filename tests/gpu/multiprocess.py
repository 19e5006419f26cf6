"""Engines in processes of their own, as users start them; prints what it finds.

python tests/gpu/multiprocess.py [--pp 2] [--tp 2] [--eager]
"""

from __future__ import annotations

import argparse
import time

import torch

from tests.support.steered import SteeredOracle


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--eager", action="store_true")
    given = parser.parse_args()
    from vllm import LLM, SamplingParams

    import vllm_weir as weir

    started = time.time()
    llm = LLM(
        weir.demo_model(),
        dtype="bfloat16",
        max_model_len=256,
        kv_cache_memory_bytes=1 << 30,
        seed=0,
        pipeline_parallel_size=given.pp,
        tensor_parallel_size=given.tp,
        enforce_eager=given.eager,
    )
    print("started after", round(time.time() - started, 1), "s", flush=True)
    reports = llm.collective_rpc("weir_report")
    print([(r["runner"], r["ok"], r["taps"]) for r in reports], flush=True)
    base = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    vector = torch.randn(reports[0]["d_model"], generator=torch.Generator().manual_seed(0))
    steps = [[], [weir.Add(vector, 4, 3.0)], [weir.Add(vector, 3, 3.0, hook="resid_pre", positions="generated")]]
    capture = [weir.Capture("resid_post"), weir.Capture("resid_pre")]
    params = [weir.params(base, capture=capture, interventions=s) for s in steps]
    oracle = SteeredOracle(weir.demo_model())
    for _ in range(2):
        outs = llm.generate(["Nora was counting coins at the market on Monday."] * 3, params, use_tqdm=False)
        for out, interventions in zip(outs, steps, strict=True):
            prompt, got = list(out.prompt_token_ids), list(out.outputs[0].token_ids)
            rows, _ = oracle.steered((prompt + got)[:-1], len(prompt), interventions)
            worst = 0.0
            for site in out.activations.sites:
                cosine = torch.nn.functional.cosine_similarity(
                    out.activations[site].double(), rows[tuple(site)].double()
                )
                worst = max(worst, float((1 - cosine).max()))
            print(f"{len(out.activations)} sites, 1 - cosine {worst:.1e}, {out.receipt.steered}", flush=True)
            assert len(out.activations) == 12 and worst <= 1e-3
    print(llm.collective_rpc("weir_usage"), flush=True)
    print("all is well", flush=True)


if __name__ == "__main__":
    main()
