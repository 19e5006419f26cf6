"""Drop-in: ``weir.LLM`` is ``vllm.LLM`` whose outputs carry hidden states.

python examples/drop_in.py [MODEL]
"""

from __future__ import annotations

import sys

import torch
from vllm import SamplingParams

import vllm_weir as weir


def main(model: str) -> None:
    llm = weir.LLM(
        model,
        layers=[2, 5],
        include_prefill=True,
        max_model_len=256,
        kv_cache_memory_bytes=256 << 20,
        # On CPU compiling takes longer than this example; on a GPU leave it on.
        enforce_eager=not torch.cuda.is_available(),
    )
    prompts = ["Tom went to the garden.", "Anna took the boat out early that morning."]
    for out in llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0), use_tqdm=False):
        print(f"\n{out.prompt!r} -> {out.outputs[0].text!r}")
        for layer, rows in out.hidden_states.items():
            # Row j is the one that output token j was sampled from.
            print(f"  block {layer}: output {list(rows.shape)}, prompt {list(out.prefill_hidden_states[layer].shape)}")


# vLLM starts processes that import this module again.
if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else weir.demo_model())
