"""Offline: read the residual stream of several prompts, each with its own wishes, in one batch of plain ``vllm.LLM``.

python examples/capture.py [MODEL]
"""

from __future__ import annotations

import sys

import torch
from vllm import LLM, SamplingParams

import vllm_weir as weir

PROMPTS = ["Tom went to the garden.", "Anna took the boat out early that morning.", "The market was open."]


def main(model: str) -> None:
    # On CPU compiling takes longer than this example; on a GPU leave it on.
    eager = not torch.cuda.is_available()
    llm = LLM(model, max_model_len=256, kv_cache_memory_bytes=256 << 20, enforce_eager=eager)
    plain = SamplingParams(max_tokens=12, temperature=0)
    params = [
        # Every block at every prompt token.
        weir.params(plain, capture=weir.Capture("resid_post", positions="prompt")),
        # Two blocks, at the rows that the outputs were sampled from, as float32.
        weir.params(plain, capture=weir.Capture("resid_post", layers=[1, 3], positions="sampled", dtype="float32")),
        # Nothing: this request does not know that the others are being read.
        plain,
    ]
    for prompt, out in zip(PROMPTS, llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
        print(f"\n{prompt!r} -> {out.outputs[0].text!r}")
        if out.activations is None:
            print("  nothing captured")
            continue
        for site, rows in out.activations.items():
            print(f"  {site}: {list(rows.shape)} {rows.dtype}, mean norm {rows.float().norm(dim=1).mean():.2f}")
        print(f"  positions {out.activations.positions.tolist()}")
        print(f"  {out.receipt}")


# vLLM starts processes that import this module again.
if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else weir.demo_model())
