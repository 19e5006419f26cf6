"""The most active features of each token, and what the model would say next if it stopped at each block.

The autoencoder has random weights here; `weir.SAE.load(directory)` reads those of SAELens and Gemma Scope.
"""

from __future__ import annotations

import torch
from vllm import LLM, SamplingParams

import vllm_weir as weir

LAYER, D_SAE = 2, 512


def random_sae(d_model: int) -> weir.SAE:
    """Return an autoencoder of the stream after a block, with random weights."""
    generator = torch.Generator().manual_seed(0)
    encoder = torch.randn(d_model, D_SAE, generator=generator) / d_model**0.5
    return weir.SAE.from_tensors(
        "standard",
        ("resid_post", LAYER),
        W_enc=encoder,
        W_dec=encoder.T.contiguous(),
        b_enc=torch.zeros(D_SAE),
        b_dec=torch.zeros(d_model),
    )


def main() -> None:
    llm = LLM(weir.demo_model(), max_model_len=256, kv_cache_memory_bytes=256 << 20, enforce_eager=True)
    (d_model,) = next(site.shape for site in weir.sites(llm) if site.hook == "resid_post")
    weir.load_sae(llm, "random", random_sae(d_model))

    params = weir.params(
        SamplingParams(max_tokens=8, temperature=0),
        features=weir.Features("random", top_k=3),
        lens=weir.Lens(top_k=3, positions="last_prompt"),
    )
    (out,) = llm.generate(["Once upon a time"], params)

    features = out.features["random"]
    for position, ids, values in zip(features.positions, features.ids, features.values, strict=True):
        print(int(position), [(int(i), round(float(v), 2)) for i, v in zip(ids, values, strict=True)])
    tokenizer = llm.get_tokenizer()
    for layer, likely in out.lens.items():
        print(f"after block {layer}:", [tokenizer.decode([int(token)]) for token in likely.token_ids[0]])


if __name__ == "__main__":
    main()
