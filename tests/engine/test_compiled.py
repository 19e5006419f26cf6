"""Compiled models, and the compile cache: what is tapped is part of its key."""

from __future__ import annotations

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import SELECTORS, asking, directory, oracle, prompts, sampling, verify
from tests.support.engines import get_llm
from tests.support.machine import inductor, needs
from tests.support.measure import rel_err, rounding
from tests.support.models import FAMILIES
from tests.support.references import reference

pytestmark = [pytest.mark.engine, needs(inductor)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("vllm-cache"))


def compiled(model_dir, cache, **env):
    """An engine in a process of its own: what torch's compiler keeps of a hundred engines before is not there."""
    return get_llm(model_dir, enforce_eager=False, in_process=False, env={"VLLM_CACHE_ROOT": cache} | env)


def check_all(llm, truth):
    asked = [asking(selector, truth.num_layers) for selector in SELECTORS]
    for _ in range(2):
        outs = llm.generate(prompts(), [params for params, _ in asked], use_tqdm=False)
        for out, (_, wanted) in zip(outs, asked, strict=True):
            verify(out, wanted, truth)


def check_steering(llm, truth):
    """Two blocks steered, and what leaves and enters all of them; `truth` is a `SteeredOracle`."""
    vector = torch.randn(truth.hidden_size, generator=torch.Generator().manual_seed(1))
    moves = [weir.Add(vector, 1, 2.0), weir.Ablate(vector, 1, hook="resid_pre", positions="generated")]
    params = weir.params(sampling(), capture=[weir.Capture(), weir.Capture("resid_pre")], interventions=moves)
    for out in llm.generate(prompts(), params, use_tqdm=False):
        prompt, got = list(out.prompt_token_ids), list(out.outputs[0].token_ids)
        rows, logits = truth.steered((prompt + got)[:-1], len(prompt), moves, sites=out.activations.sites)
        assert len(got) == 8 and got == logits[len(prompt) - 1 :].argmax(-1).tolist()
        for site in out.activations.sites:
            assert rel_err(out.activations[site], rows[tuple(site)]) <= rounding()


@pytest.mark.thorough
def test_settings_switched_between_starts_on_one_cache(root, cache):
    """One block tapped, then all of them: the second start must not reuse the first one's graphs."""
    model_dir = directory(root, "llama", "b")  # of three blocks: compiling takes a time for each
    truth = oracle(model_dir)
    llm = compiled(model_dir, cache, WEIR_LAYERS="0")
    assert llm.llm_engine.vllm_config.compilation_config.mode.name != "NONE"
    first = weir.params(sampling(), capture=weir.Capture("resid_post", 0))
    for out in llm.generate(prompts(), first, use_tqdm=False):
        verify(out, {("resid_post", 0): ["all"]}, truth)
    with pytest.raises(weir.WeirError, match="not tapped"):
        llm.generate(prompts(), weir.params(sampling(), capture=weir.Capture("resid_post", 2)), use_tqdm=False)
    check_all(compiled(model_dir, cache), truth)


# A start with compilation takes a minute: others than these are for `pytest -m slow`.
COMPILED = [
    pytest.param("llama", "b"),  # three blocks: each takes its time
    pytest.param("gemma2", "a", marks=pytest.mark.thorough),
    *(pytest.param(family, "a", marks=pytest.mark.slow) for family in FAMILIES if family != "gemma2"),
]


@pytest.mark.parametrize(("family", "shape"), COMPILED)
def test_compiled_rows_and_steering(root, cache, family, shape):
    model_dir = directory(root, family, shape)
    llm, truth = compiled(model_dir, cache), reference(model_dir)
    check_all(llm, truth)
    check_steering(llm, truth)


def test_the_compile_key_follows_hooks_and_layers(root, monkeypatch):
    from vllm.engine.arg_utils import EngineArgs

    def key(own=None, **environ):
        # In the environment, because additional_config is in vLLM's own key already.
        for name in ("WEIR_LAYERS", "WEIR_HOOKS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        config = EngineArgs(model=str(directory(root)), dtype="float32").create_engine_config()
        return config.compute_hash()

    keys = [
        key(),
        key(WEIR_LAYERS="0"),
        key(WEIR_LAYERS="0,1"),
        key(WEIR_HOOKS="resid_pre"),
        key(WEIR_HOOKS="resid_pre,resid_post"),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == key(WEIR_LAYERS="all") == keys[0]
    assert key(WEIR_HOOKS="resid_post,post_block") == key(WEIR_HOOKS="resid_post") != keys[0]
    assert key(WEIR_LAYERS="1,0") == keys[2]
