"""The mean row of each block over many prompts, as a stream: only rows of the prompts under way are in memory.

python examples/build_on_the_engine.py
"""

from __future__ import annotations

import torch
from vllm import LLM, SamplingParams

import vllm_weir as weir

NAMES, PLACES = ("Anna", "Tom", "Lucy", "Ben", "Mia"), ("garden", "park", "river", "school", "market")
MOODS = ("happy", "sad", "glad", "unhappy")


def main(model: str) -> None:
    # On CPU compiling takes longer than this example; on a GPU leave it on.
    eager = not torch.cuda.is_available()
    llm = LLM(model, dtype="float32", max_model_len=256, kv_cache_memory_bytes=256 << 20, enforce_eager=eager)
    engine = weir.engine(llm)
    layers, width = range(engine.capabilities.num_layers), engine.capabilities.d_model

    params = weir.params(SamplingParams(max_tokens=1), capture=weir.Capture("resid_post", positions="prompt"))
    prompts = (f"{name} went to the {place}. {name} was {m}." for name in NAMES for place in PLACES for m in MOODS)
    total, rows, done = torch.zeros(len(layers), width, dtype=torch.float64), 0, 0
    for _, out in engine.stream((prompt, params) for prompt in prompts):
        acts = out.activations
        total += torch.stack([acts["resid_post", layer].double().sum(0) for layer in layers])
        rows, done = rows + len(acts.positions), done + 1

    print(f"{done} prompts, {rows} rows; the mean row of each block has length", (total / rows).norm(dim=1).tolist())


# vLLM starts processes that import this module again.
if __name__ == "__main__":
    main(weir.demo_model())
