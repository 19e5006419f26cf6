"""A control vector that llama.cpp and repeng read, too: made here, saved as GGUF, loaded, and added at three scales.

python examples/load_vector.py [FILE]: a file of your own, for the model that ships with Weir
"""

from __future__ import annotations

import sys

from vllm import LLM, SamplingParams

import vllm_weir as weir

HAPPY = "Tom went to the garden. Tom was happy."
SAD = "Tom went to the garden. Tom was sad."


def make(llm: LLM, path: str) -> None:
    """Write how the rows of two prompts differ after blocks 2 and 3, over their last two tokens."""
    read = weir.params(SamplingParams(max_tokens=1), capture=weir.Capture("resid_post", [2, 3], "-2:"))
    happy, sad = (out.activations for out in llm.generate([HAPPY, SAD], read, use_tqdm=False))
    vectors = {n: happy["resid_post", n].float().mean(0) - sad["resid_post", n].float().mean(0) for n in (2, 3)}
    weir.Directions("resid_post", vectors=vectors, method="diff").save(path, model_hint="llama")


def main(path: str | None) -> None:
    llm = LLM(weir.demo_model(), max_model_len=256, kv_cache_memory_bytes=256 << 20, enforce_eager=True)
    if path is None:
        path = "mood.gguf"
        make(llm, path)
    mood = weir.load_vector(path)
    print(f"{path}: blocks {list(mood.layers)} at {mood.hook}, width {mood.width}")

    scales = (-1.5, 0.0, 1.5)
    plain = SamplingParams(max_tokens=24, temperature=0)
    params = [weir.params(plain, interventions=mood.add(scale)) for scale in scales]
    opening = "Anna took the boat out early that morning. Anna"
    for scale, out in zip(scales, llm.generate([opening] * len(scales), params, use_tqdm=False), strict=True):
        print(f"scale {scale:+g}: {opening}{out.outputs[0].text}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
