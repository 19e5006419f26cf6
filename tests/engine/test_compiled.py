"""Compiled models, and the compile cache: what is tapped is part of its key."""

from __future__ import annotations

import pytest

import vllm_weir as weir
from tests.engine.common import SELECTORS, asking, directory, oracle, prompts, sampling, verify
from tests.support.engines import get_llm

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
CLOSE_OTHERS = True


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("vllm-cache"))


def compiled(model_dir, cache, **env):
    return get_llm(model_dir, enforce_eager=False, env={"VLLM_CACHE_ROOT": cache} | env)


def check_all(llm, truth):
    asked = [asking(selector, truth.num_layers) for selector in SELECTORS]
    for _ in range(2):
        outs = llm.generate(prompts(), [params for params, _ in asked], use_tqdm=False)
        for out, (_, wanted) in zip(outs, asked, strict=True):
            verify(out, wanted, truth)


def test_settings_switched_between_starts_on_one_cache(root, cache):
    """One block tapped, then all of them: the second start must not reuse the first one's graphs."""
    model_dir = directory(root)
    truth = oracle(model_dir)
    llm = compiled(model_dir, cache, WEIR_LAYERS="0")
    assert llm.llm_engine.vllm_config.compilation_config.mode.name != "NONE"
    first = weir.params(sampling(), capture=weir.Capture("resid_post", 0))
    for out in llm.generate(prompts(), first, use_tqdm=False):
        verify(out, {("resid_post", 0): ["all"]}, truth)
    with pytest.raises(weir.WeirError, match="not tapped"):
        llm.generate(prompts(), weir.params(sampling(), capture=weir.Capture("resid_post", 1)), use_tqdm=False)
    check_all(compiled(model_dir, cache), truth)


def test_compiled_gemma2(root, cache):
    model_dir = directory(root, "gemma2")
    check_all(compiled(model_dir, cache), oracle(model_dir))


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
    assert key() == key(WEIR_LAYERS="all") == key(WEIR_HOOKS="resid_post") == keys[0]
    assert key(WEIR_LAYERS="1,0") == keys[2]
