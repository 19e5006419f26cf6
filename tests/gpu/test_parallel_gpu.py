"""Tensor and pipeline parallelism on two GPUs: rows and steering equal those of one GPU within bf16 rounding."""

from __future__ import annotations

import pytest
import torch

from tests.support.engines import close_all, get_llm
from tests.support.machine import gpus, needs

pytestmark = [pytest.mark.gpu, needs(gpus(2))]


def rows_of(directory, **parallel):
    """Outputs of a plain and of a steered request; the steered block lies on the second stage under PP=2."""
    from vllm import SamplingParams

    import vllm_weir as weir

    llm = get_llm(
        directory, in_process=False, enforce_eager=False, dtype="bfloat16", kv_cache_memory_bytes=1 << 30, **parallel
    )
    vector = torch.randn(128, generator=torch.Generator().manual_seed(0))
    base = SamplingParams(max_tokens=1, temperature=0)
    capture = [weir.Capture("resid_post"), weir.Capture("resid_pre")]
    params = [
        weir.params(base, capture=capture),
        weir.params(base, capture=capture, interventions=weir.Add(vector, 3, 4.0, hook="resid_pre")),
    ]
    prompts = [{"prompt_token_ids": [(7 * i + 3 * j) % 500 for j in range(40)]} for i in range(2)]
    outs = llm.generate(prompts, params, use_tqdm=False)
    taken = [(out.activations.to_dict(), out.receipt.steered) for out in outs]
    close_all()
    return taken


@pytest.fixture(scope="module")
def alone(directory):
    return rows_of(directory)


@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_gpus_equal_one(directory, alone, parallel):
    for (rows, steered), (reference, expected) in zip(rows_of(directory, **{parallel: 2}), alone, strict=True):
        assert steered == expected
        assert rows.keys() == reference.keys() and len(rows) == 8
        worst = 0.0
        for site, row in rows.items():
            assert row.shape == (40, 128)
            cosine = torch.nn.functional.cosine_similarity(row.double(), reference[site].double(), dim=-1)
            worst = max(worst, float((1 - cosine).max()))
        print(f"\n{parallel}: 1 - cosine {worst:.1e}")
        assert worst <= 1e-3
