"""Steering: a vector from two prompts, added at three scales to one opening, all in one batch of plain ``vllm.LLM``.

python examples/steer.py [MODEL]
"""

from __future__ import annotations

import sys

import torch
from vllm import LLM, SamplingParams

import vllm_weir as weir

LAYER = 2
HAPPY = "Tom went to the garden. Tom was happy."
SAD = "Tom went to the garden. Tom was sad."


def main(model: str) -> None:
    # On CPU compiling takes longer than this example; on a GPU leave it on.
    eager = not torch.cuda.is_available()
    llm = LLM(model, max_model_len=256, kv_cache_memory_bytes=256 << 20, enforce_eager=eager)

    # How the rows of the two prompts differ after one block, over their last two tokens.
    read = weir.params(SamplingParams(max_tokens=1), capture=weir.Capture("resid_post", LAYER, "-2:"))
    happy, sad = (
        out.activations["resid_post", LAYER].float() for out in llm.generate([HAPPY, SAD], read, use_tqdm=False)
    )
    vector = happy.mean(0) - sad.mean(0)

    scales = (-2.0, 0.0, 2.0)
    plain = SamplingParams(max_tokens=24, temperature=0)
    params = [weir.params(plain, interventions=weir.Add(vector, LAYER, s, positions="all")) for s in scales]
    opening = "Anna took the boat out early that morning. Anna"
    for scale, out in zip(scales, llm.generate([opening] * len(scales), params, use_tqdm=False), strict=True):
        print(f"\nscale {scale:+g}: {opening}{out.outputs[0].text}")
        print(f"  rows changed: {out.receipt.steered}")


# vLLM starts processes that import this module again.
if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else weir.demo_model())
