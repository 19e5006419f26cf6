"""vllm-lens's request keys, unchanged: ``output_residual_stream`` reads, ``apply_steering_vectors`` steers.

python examples/lens.py [MODEL]
"""

from __future__ import annotations

import sys

import torch
from vllm import LLM, SamplingParams

import vllm_weir as weir

LAYERS = [2, 3]
PROMPTS = ["Tom went to the garden. Tom was happy.", "Tom went to the garden. Tom was sad."]


def main(model: str) -> None:
    # On CPU compiling takes longer than this example; on a GPU leave it on.
    eager = not torch.cuda.is_available()
    llm = LLM(model, max_model_len=256, kv_cache_memory_bytes=256 << 20, enforce_eager=eager)

    read = SamplingParams(max_tokens=1, extra_args={"output_residual_stream": LAYERS})
    happy, sad = (out.activations["residual_stream"] for out in llm.generate(PROMPTS, read, use_tqdm=False))
    print(f"residual_stream: {list(happy.shape)}  [layers, rows, d_model]")

    # [layers, d_model]: one row a layer, added at every position.
    vector = (happy[:, -2:].float() - sad[:, -2:].float()).mean(1)
    for scale in (-1.0, 1.0):
        steering = weir.SteeringVector(vector, LAYERS, scale=scale)
        steer = SamplingParams(max_tokens=20, temperature=0, extra_args={"apply_steering_vectors": [steering]})
        out = llm.generate("Anna took the boat out early that morning. Anna was", steer, use_tqdm=False)[0]
        print(f"scale {scale:+g}: ...Anna was{out.outputs[0].text}")
        print(f"  rows changed: {out.receipt.steered}")


# vLLM starts processes that import this module again.
if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else weir.demo_model())
