"""`routing` under CUDA graphs: the array of vLLM's own flag, of the very same pass, and what both cost."""

from __future__ import annotations

import time

import numpy as np
import pytest

import vllm_weir as weir
from tests.engine.common import prompts, sampling
from tests.support.engines import close_all, get_llm
from tests.support.models import make_model

pytestmark = pytest.mark.gpu
LENGTHS = (1, 7, 40, 150, 64, 33, 2, 100)
GENERATED = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model("mixtral", "a", tmp_path_factory.mktemp("experts"))


def engine(model, dtype="bfloat16", **more):
    arguments = dict(enforce_eager=False, kv_cache_memory_bytes=1 << 30, max_num_batched_tokens=128, dtype=dtype)
    # MoE models may run on runner V1, where a GPU has taps between blocks alone unless settings name others.
    arguments["additional_config"] = {"weir": {"hooks": ["resid_pre", "resid_post", "router_logits"]}}
    return get_llm(model, **arguments | more)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE"])
def test_as_vllms_own_flag(model, mode, dtype):
    """Every array, in chunked prefills and graphs, with prefix hits in the second round."""
    llm = engine(model, dtype, enable_return_routed_experts=True, compilation_config={"cudagraph_mode": mode})
    each = [weir.params(sampling(GENERATED), routing=weir.Routing(weights=True)), sampling(GENERATED)] * 4
    for _ in range(2):
        for out, params in zip(llm.generate(prompts(LENGTHS), each, use_tqdm=False), each, strict=True):
            completion = out.outputs[0]
            theirs, ours = vars(completion)["routed_experts"], completion.routed_experts
            assert theirs.shape == (len(out.prompt_token_ids) + GENERATED - 1, 3, 2)
            assert np.array_equal(ours, theirs) and ours.dtype == theirs.dtype
            if params.extra_args:
                weights = completion.routing_weights
                assert np.abs(weights.sum(-1) - 1).max() < 1e-2 and (weights >= 0).all()


def test_requests_beside_it_keep_their_tokens(model):
    """And rows of other points, alone and together with routing."""
    llm = engine(model, "float32", enable_prefix_caching=False)
    both = weir.params(sampling(GENERATED), routing=True, capture=weir.Capture("expert_ids"))
    outs = llm.generate(prompts(LENGTHS), [both, sampling(GENERATED)] * 4, use_tqdm=False)
    for out in outs[::2]:
        found, rows = out.outputs[0].routed_experts, out.activations
        for layer in range(3):
            chosen = np.sort(rows["expert_ids", layer].numpy())
            assert np.array_equal(np.sort(found[:, layer].astype(np.int64)), chosen)
    assert all(out.outputs[0].routed_experts is None for out in outs[1::2])


def test_cost(model, capfd):  # engines start here, which write to the file of stdout
    """Prints seconds of a crowd without routing, with vLLM's flag and with Weir's; the arrays have to be there."""
    crowd, seconds = prompts([32] * 64), {}
    for name, flag, params in (
        ("without", False, sampling(128)),
        ("flag", True, sampling(128)),
        ("routing", False, weir.params(sampling(128), routing=True)),
    ):
        llm = engine(model, enable_prefix_caching=False, **({"enable_return_routed_experts": True} if flag else {}))
        for _ in range(3):  # the first rounds capture graphs
            start = time.perf_counter()
            outs = llm.generate(crowd, params, use_tqdm=False)
            found = [out.outputs[0].routed_experts for out in outs]
            seconds[name] = time.perf_counter() - start
        assert all((array is None) == (name == "without") for array in found)
        assert name == "without" or {array.shape for array in found} == {(159, 3, 2)}
        del outs, found
        close_all()
    with capfd.disabled():
        print({name: round(taken, 3) for name, taken in seconds.items()})
