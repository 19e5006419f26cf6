"""Beam search of a steered model, and the embedding that the same model makes of a steered text.

python examples/beams_and_embeddings.py [MODEL]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from vllm import LLM, PoolingParams, SamplingParams
from vllm.sampling_params import BeamSearchParams

import vllm_weir as weir

LAYER = 2
HAPPY, SAD = "Tom went to the garden. Tom was happy.", "Tom went to the garden. Tom was sad."


def options() -> dict[str, Any]:
    # On CPU compiling takes longer than this example; on a GPU leave it on.
    return {
        "max_model_len": 256,
        "kv_cache_memory_bytes": 256 << 20,
        "enforce_eager": not torch.cuda.is_available(),
    }


def beams(model: str) -> torch.Tensor:
    """Print two beams, each with and without a vector; return the vector."""
    llm = LLM(model, **options())
    read = weir.params(SamplingParams(max_tokens=1), capture=weir.Capture("resid_post", LAYER, "-2:"))
    happy, sad = (out.activations["resid_post", LAYER].mean(0) for out in llm.generate([HAPPY, SAD], read))
    vector = happy - sad

    search = BeamSearchParams(beam_width=2, max_tokens=8)
    # On generated tokens alone, though vLLM sends each step of a search as a prompt.
    add = weir.Add(vector, LAYER, 2.0, positions="generated")
    asked = weir.params(search, capture=weir.Capture("resid_post", LAYER), interventions=add)
    opening = "Anna took the boat out early that morning. Anna"
    for name, params in (("plain", weir.params(search, capture=weir.Capture("resid_post", LAYER))), ("steered", asked)):
        (output,) = llm.beam_search([{"prompt": opening}], params)
        for beam in output.sequences:
            rows = beam.activations["resid_post", LAYER]
            print(f"{name}: {len(rows)} rows, changed {beam.receipt.steered}: ...{beam.text[len(opening) :]}")
    return vector


def embeddings(model: str, vector: torch.Tensor) -> None:
    """Print how far the vector moves a text's embedding."""
    llm = LLM(model, runner="pooling", convert="embed", **options())
    asked = weir.params(
        PoolingParams(), capture=weir.Capture("resid_post", LAYER), interventions=weir.Add(vector, LAYER)
    )
    plain, steered = llm.embed([SAD, SAD], pooling_params=[PoolingParams(), asked])
    cosine = torch.tensor(plain.outputs.embedding) @ torch.tensor(steered.outputs.embedding)
    print(f"embedding of {len(steered.activations['resid_post', LAYER])} rows, cosine to the plain one {cosine:.3f}")


# vLLM starts processes that import this module again.
if __name__ == "__main__":
    given = sys.argv[1] if len(sys.argv) > 1 else weir.demo_model()
    embeddings(given, beams(given))
