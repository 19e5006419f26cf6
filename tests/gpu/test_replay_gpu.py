"""`Replay` in CUDA graphs: the array at every covered position, log-probabilities as in a pass without graphs, and the
cost of it."""

from __future__ import annotations

import time

import numpy as np
import pytest

import vllm_weir as weir
from tests.conformance.oracle import Oracle
from tests.engine.common import prompts, sampling
from tests.gpu.test_routing_gpu import GENERATED, LENGTHS, engine
from tests.support.engines import close_all
from tests.support.forced import forced, random_experts
from tests.support.models import make_model

pytestmark = pytest.mark.gpu
EXPERTS, ROUNDS = 8, 4
"""Graphs of a replay are captured in the second step that needs them."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model("mixtral", "a", tmp_path_factory.mktemp("replayed"))


def plain():
    return sampling(GENERATED, detokenize=False, logprobs=1)


def scores(out):
    done = out.outputs[0]
    return np.array([at[token].logprob for at, token in zip(done.logprobs, done.token_ids, strict=True)])


def arrays(seed=0):
    return [random_experts((n + GENERATED - 5, 3, 2), EXPERTS, seed + k) for k, n in enumerate(LENGTHS)]


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE"])
def test_graphs_do_as_passes_without_them(model, mode):
    """Chunked prefills and decoding, beside plain requests, against transformers with the same experts."""
    llm = engine(model, "float32", compilation_config={"cudagraph_mode": mode}, enable_prefix_caching=False)
    oracle, given = Oracle(model), arrays()
    asked = [weir.params(plain(), routing=weir.Replay(array, weights=True)) for array in given]
    each = [params if k % 2 == 0 else plain() for k, params in enumerate(asked)]
    for _ in range(ROUNDS):
        outs = llm.generate(prompts(LENGTHS), each, use_tqdm=False)
        for k, (out, array) in enumerate(zip(outs, given, strict=True)):
            ids = [*out.prompt_token_ids, *out.outputs[0].token_ids]
            if k % 2 == 0:
                found = out.outputs[0].routed_experts
                assert np.array_equal(found[: len(array)], array) and found.shape == (len(ids) - 1, 3, 2)
                assert np.abs(out.outputs[0].routing_weights.sum(-1) - 1).max() < 1e-5
            with forced(oracle, array if k % 2 == 0 else array[:0], EXPERTS):
                logits = oracle.logits(ids[:-1])[len(out.prompt_token_ids) - 1 :]
            wanted = logits.log_softmax(-1).numpy()[np.arange(GENERATED), ids[-GENERATED:]]
            assert np.abs(scores(out) - wanted).max() < 5e-3, k


def test_its_own_routing_changes_no_bit(model):
    """A rollout replayed in batches of the same sizes, in bfloat16, where weights come from a kernel of vLLM's."""
    llm = engine(model, enable_prefix_caching=False)
    for _ in range(ROUNDS):
        rollouts = llm.generate(prompts(LENGTHS), weir.params(plain(), routing=True), use_tqdm=False)
    again = [weir.params(plain(), routing=weir.Replay(out.outputs[0].routed_experts)) for out in rollouts]
    for _ in range(ROUNDS):
        for out, before in zip(llm.generate(prompts(LENGTHS), again, use_tqdm=False), rollouts, strict=True):
            assert out.outputs[0].token_ids == before.outputs[0].token_ids
            assert np.array_equal(scores(out), scores(before))
            assert np.array_equal(out.outputs[0].routed_experts, before.outputs[0].routed_experts)


def test_neighbours_are_routed_as_without_it(model):
    """To the bit where vLLM's kernel sums in the same order whatever other tokens an expert has, else within rounding;
    and to the bit in steps after it."""
    llm = engine(model, "float32", enable_prefix_caching=False)
    free = [weir.params(plain(), routing=weir.Routing(weights=True))] * len(LENGTHS)
    mixed = [
        weir.params(plain(), routing=weir.Replay(array)) if k % 2 == 0 else params
        for k, (array, params) in enumerate(zip(arrays(50), free, strict=True))
    ]
    for _ in range(ROUNDS):
        alone = llm.generate(prompts(LENGTHS), free, use_tqdm=False)
        beside = llm.generate(prompts(LENGTHS), mixed, use_tqdm=False)
        for before, after in zip(alone[1::2], beside[1::2], strict=True):
            assert before.outputs[0].token_ids == after.outputs[0].token_ids
            assert np.array_equal(before.outputs[0].routed_experts, after.outputs[0].routed_experts)
            assert np.abs(before.outputs[0].routing_weights - after.outputs[0].routing_weights).max() < 1e-4
            assert np.abs(scores(before) - scores(after)).max() < 1e-4
    later = llm.generate(prompts(LENGTHS), free, use_tqdm=False)
    for before, after in zip(alone, later, strict=True):
        assert np.array_equal(scores(before), scores(after))


def test_cost(model, capsys):
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
    with capsys.disabled():
        print({name: round(taken, 3) for name, taken in seconds.items()})
