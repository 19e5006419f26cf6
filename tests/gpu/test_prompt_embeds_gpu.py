"""Prompts as embeddings on CUDA: tokens are looked up before the model runs, and `embed` is tapped there."""

from __future__ import annotations

import pytest
import torch

import vllm_weir as weir
from tests.conformance.oracle import Oracle
from tests.gpu.test_capture_gpu import GRAPHS, engine
from tests.support.measure import rel_err
from tests.support.models import make_model
from vllm_weir.schema.hooks import MODEL_HOOKS, STREAM_HOOKS

pytestmark = pytest.mark.gpu
BOUND = 5e-3  # attention in float32 rounds its products as TF32 there


@pytest.mark.parametrize(("family", "graphs"), [*(("llama", graphs) for graphs in GRAPHS), ("gpt2", "full")])
def test_rows_and_steering_in_mixed_batches(tmp_path, family, graphs):
    from vllm import SamplingParams

    where = make_model(family, "a", tmp_path)
    truth = Oracle(where)
    # vLLM's runner V1 serves them, which has the points between blocks alone in its graphs unless told.
    hooks = (*MODEL_HOOKS, *STREAM_HOOKS)
    settings = {"weir": {"hooks": hooks}}
    llm = engine(where, graphs, dtype="float32", enable_prompt_embeds=True, additional_config=settings)
    base = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    v = torch.randn(truth.hidden_size, generator=torch.Generator().manual_seed(3))
    ids = [[(7 * n + 3 * j + j * j) % 500 + 5 for j in range(length)] for n, length in enumerate((40, 9, 17))]
    with torch.no_grad():
        given = truth.model.get_input_embeddings()(torch.tensor(ids[1]))
    prompts = [{"prompt_token_ids": ids[0]}, {"prompt_embeds": given}, {"prompt_token_ids": ids[2]}]
    every = [weir.Capture(hook) for hook in hooks]
    asked = [weir.params(base, capture=every, interventions=weir.Add(v, 0, hook="embed")), base]
    asked.append(weir.params(base, capture=every))
    for _ in range(3):  # live graphs are captured on the spot
        outs = llm.generate(prompts, asked, use_tqdm=False)
        for n, vector in ((0, v), (2, torch.zeros_like(v))):
            rows, _ = truth.steer([*ids[n], *outs[n].outputs[0].token_ids][:-1], "embed", 0, vector)
            for site in outs[n].activations.sites:
                assert rel_err(outs[n].activations[site], rows[tuple(site)]) <= BOUND, (n, site)
    with pytest.raises(weir.WeirError, match="is given as embeddings"):
        llm.generate(prompts[1], asked[2], use_tqdm=False)
