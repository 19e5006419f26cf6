"""`Replay` in CUDA graphs: the array at every covered position, log-probabilities as in a pass without graphs, and the
cost of it."""

from __future__ import annotations

import time

import numpy as np
import pytest

import vllm_weir as weir
from tests.conformance.oracle import Oracle
from tests.engine.common import prompts, sampling
from tests.gpu import test_routing_gpu
from tests.gpu.test_routing_gpu import GENERATED, LENGTHS
from tests.support.engines import close_all
from tests.support.forced import forced, random_experts
from tests.support.models import make_model

pytestmark = pytest.mark.gpu
EXPERTS, ROUNDS = 8, 4
"""Graphs of a replay are captured in the second step that needs them."""
EXACT, NEAR = 5e-3, 1e-3
"""On log-probabilities: against transformers in float32, and between passes of one engine."""


@pytest.fixture(scope="module", autouse=True)
def products():
    """Products as float32 rounds them; by default vLLM's kernels round as TF32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_F32_DEFAULT", "ieee")
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model("mixtral", "a", tmp_path_factory.mktemp("replayed"))


def engine(model, dtype="bfloat16", **more):
    """On runner V2, whatever vLLM takes for the model: V1 has one set of graphs, in which nothing is replayed."""
    return test_routing_gpu.engine(model, dtype, env={"VLLM_USE_V2_MODEL_RUNNER": "1"}, **more)


def plain():
    return sampling(GENERATED, detokenize=False, logprobs=1)


def scores(out):
    done = out.outputs[0]
    return np.array([at[token].logprob for at, token in zip(done.logprobs, done.token_ids, strict=True)])


def arrays(seed=0):
    return [random_experts((n + GENERATED, 3, 2), EXPERTS, seed + k) for k, n in enumerate(LENGTHS)]


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE"])
def test_graphs_have_the_experts_of_the_array(model, mode):
    """In chunked prefills and decoding, beside plain requests: log-probabilities as of transformers with the same
    experts, in the first rounds, which have no graphs, and in the last ones."""
    llm = engine(model, "float32", compilation_config={"cudagraph_mode": mode}, enable_prefix_caching=False)
    oracle, given = Oracle(model), arrays()
    asked = [weir.params(plain(), routing=weir.Replay(array, weights=True)) for array in given]
    each = [params if k % 2 == 0 else plain() for k, params in enumerate(asked)]
    for _ in range(ROUNDS):
        outs = llm.generate(prompts(LENGTHS), each, use_tqdm=False)
        for out, array in list(zip(outs, given, strict=True))[::2]:
            done, ids = out.outputs[0], [*out.prompt_token_ids, *out.outputs[0].token_ids]
            assert np.array_equal(done.routed_experts, array[: len(ids) - 1])
            assert np.abs(done.routing_weights.sum(-1) - 1).max() < 1e-5
            apart = []
            for forcing in (array, array[:, :, ::-1] ^ 1):
                with forced(oracle, forcing, EXPERTS):
                    logits = oracle.logits(ids[:-1])[-GENERATED:]
                wanted = logits.log_softmax(-1).numpy()[np.arange(GENERATED), ids[-GENERATED:]]
                apart.append(np.abs(scores(out) - wanted).max())
            assert apart[0] < EXACT and apart[1] > 20 * EXACT, apart


def test_a_rollout_is_replayed_with_its_log_probabilities(model):
    llm = engine(model, "float32", enable_prefix_caching=False)
    for _ in range(ROUNDS):
        rollouts = llm.generate(prompts(LENGTHS), weir.params(plain(), routing=True), use_tqdm=False)
    again = [weir.params(plain(), routing=weir.Replay(out.outputs[0].routed_experts)) for out in rollouts]
    for _ in range(ROUNDS):
        for out, before in zip(llm.generate(prompts(LENGTHS), again, use_tqdm=False), rollouts, strict=True):
            assert out.outputs[0].token_ids == before.outputs[0].token_ids
            assert np.abs(scores(out) - scores(before)).max() < NEAR
            assert np.array_equal(out.outputs[0].routed_experts, before.outputs[0].routed_experts)


def test_neighbours_are_routed_as_without_it(model):
    """Their experts and weights, and what follows, beside a replay and after it. (Equal to the bit are routing and all
    else of a token by itself; a kernel of vLLM's may sum in another order where an expert has other tokens.)"""
    llm = engine(model, "float32", enable_prefix_caching=False)
    free = [weir.params(plain(), routing=weir.Routing(weights=True))] * len(LENGTHS)
    mixed = [
        weir.params(plain(), routing=weir.Replay(array)) if k % 2 == 0 else params
        for k, (array, params) in enumerate(zip(arrays(50), free, strict=True))
    ]
    for _ in range(ROUNDS):
        alone = llm.generate(prompts(LENGTHS), free, use_tqdm=False)
        beside = llm.generate(prompts(LENGTHS), mixed, use_tqdm=False)
        later = llm.generate(prompts(LENGTHS), free, use_tqdm=False)
        for before, after in (*zip(alone[1::2], beside[1::2], strict=True), *zip(alone, later, strict=True)):
            a, b = before.outputs[0], after.outputs[0]
            assert a.token_ids == b.token_ids and np.array_equal(a.routed_experts, b.routed_experts)
            assert np.abs(a.routing_weights - b.routing_weights).max() < NEAR
            assert np.abs(scores(before) - scores(after)).max() < NEAR


def test_cost(model, capfd):  # engines start here, which write to the file of stdout
    """Prints seconds of a crowd without routing, with it recorded, and replayed; the arrays have to be there."""
    crowd, seconds = prompts([32] * 64), {}
    given = [random_experts((159, 3, 2), EXPERTS, k) for k in range(64)]
    for name in ("without", "recorded", "replayed"):
        llm = engine(model, enable_prefix_caching=False)
        params = [
            sampling(128)
            if name == "without"
            else weir.params(sampling(128), routing=True if name == "recorded" else weir.Replay(array))
            for array in given
        ]
        for _ in range(3):  # the first rounds capture graphs
            start = time.perf_counter()
            outs = llm.generate(crowd, params, use_tqdm=False)
            found = [out.outputs[0].routed_experts for out in outs]
            seconds[name] = time.perf_counter() - start
        if name == "replayed":
            assert all(np.array_equal(a, b) for a, b in zip(found, given, strict=True))
        del outs, found
        close_all()
    with capfd.disabled():
        print({name: round(taken, 3) for name, taken in seconds.items()})
