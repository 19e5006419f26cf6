"""Offline: rows that leave the device compressed, and what is lost by it.

python examples/compress.py [MODEL]
"""

from __future__ import annotations

import sys

import torch
from vllm import LLM, SamplingParams

import vllm_weir as weir

PROMPT = "Anna took the boat out early that morning."
METHODS = ["full8", "fp8", {"method": "topk8", "k": 16}, {"method": "rp8", "k": 64, "seed": 1}]


def main(model: str) -> None:
    eager = not torch.cuda.is_available()
    llm = LLM(model, max_model_len=256, kv_cache_memory_bytes=256 << 20, enforce_eager=eager)
    plain = SamplingParams(max_tokens=12, temperature=0)
    params = [weir.params(plain, capture=weir.Capture("resid_post", compress=how)) for how in [None, *METHODS]]
    exact, *packed = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    rows = exact.activations["resid_post", 1].float()
    for out in packed:
        records, header = out.activations.compressed("resid_post", 1)
        near = torch.nn.functional.cosine_similarity(out.activations["resid_post", 1], rows).mean()
        share = rows.shape[1] * exact.activations["resid_post", 1].element_size() / records.shape[1]
        print(f"{header['method']:>6}: {records.shape[1]} bytes a row, {share:.1f}x smaller, mean cosine {near:.4f}")
    # What rp8 keeps is inner products: those of the codes are near those of the rows.
    from vllm_weir.codec import project

    codes = project(*packed[-1].activations.compressed("resid_post", 1))
    print(f"rp8, cosine of the first and the last row: {cosine(codes):.2f}, of the rows themselves {cosine(rows):.2f}")


def cosine(rows: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(rows[0], rows[-1], dim=0))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else weir.demo_model())
