"""Every row equals transformers': each model, every selector at once in one batch, prompts from one token on."""

from __future__ import annotations

import pytest

import vllm_weir as weir
from tests.engine.common import SELECTORS, asking, directory, oracle, prompts, sampling, verify
from tests.support.engines import get_llm
from tests.support.models import MODELS

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("family", "shape"), MODELS, ids=["-".join(model) for model in MODELS])
def test_rows_equal_transformers(root, family, shape):
    model_dir = directory(root, family, shape)
    llm, truth = get_llm(model_dir), oracle(model_dir)
    asked = [asking(selector, truth.num_layers) for selector in SELECTORS]
    outs = llm.generate(prompts(), [params for params, _ in asked], use_tqdm=False)
    for out, (_, wanted) in zip(outs, asked, strict=True):
        verify(out, wanted, truth)

    # What leaves a block enters the next, bit for bit: both are read at one tap.
    params = weir.params(sampling(), capture=[weir.Capture("resid_post"), weir.Capture("resid_pre")])
    (out,) = llm.generate(prompts([20]), params, use_tqdm=False)
    for layer in range(1, truth.num_layers):
        assert out.activations["resid_pre", layer].equal(out.activations["resid_post", layer - 1])
