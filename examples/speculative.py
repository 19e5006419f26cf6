"""Rows and steering in an engine that verifies drafts: those of accepted tokens, at the positions that they have."""

from __future__ import annotations

import torch
from vllm import LLM, SamplingParams

import vllm_weir as weir

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def main() -> None:
    llm = LLM(
        weir.demo_model(),
        max_model_len=256,
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=True,
        speculative_config=DRAFTS,
    )
    sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    everything = weir.params(sampling, capture=weir.Capture("resid_post", [3]))
    (out,) = llm.generate("Anna found a small", everything)
    prompt, made = len(out.prompt_token_ids), len(out.outputs[0].token_ids)
    print(f"{prompt} + {made} - 1 tokens, {len(out.activations['resid_post', 3])} rows")

    # Ablate a direction from the second generated token on: no draft escapes it.
    direction = torch.randn(256, generator=torch.Generator().manual_seed(0))
    ablate = weir.Ablate(direction, [3], positions=f"{prompt + 1}:")
    (steered,) = llm.generate(
        "Anna found a small", weir.params(sampling, interventions=ablate, capture=weir.Capture("resid_post", [3]))
    )
    rows = steered.activations["resid_post", 3].float()
    along = (rows @ direction / direction.norm()).abs() / rows.norm(dim=1)
    print(f"along the direction: before {along[: prompt + 1].max():.2f}, after {along[prompt + 1 :].max():.4f}")


if __name__ == "__main__":
    main()
