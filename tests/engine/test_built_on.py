"""What is built on `weir.engine`: a stream's outputs are those of `LLM.generate`, and it leaves an engine idle."""

from __future__ import annotations

import pytest
import torch

import vllm_weir as weir
from tests.engine.common import asking, prompts, sampling, verify
from tests.support.steered import idle
from tests.unit.refusals import refused

pytestmark = pytest.mark.engine("default")
LAYERS = 4


def test_outputs_come_by_key_and_are_those_of_transformers(llm, truth):
    params, wanted = asking("all", LAYERS, max_tokens=3)
    asked = dict(zip("abcdef", prompts([9, 3, 20, 5, 7, 12]), strict=True))
    requests = ((prompt["prompt_token_ids"], params, key) for key, prompt in asked.items())
    outs = dict(weir.engine(llm).stream(requests, in_flight=4))
    assert outs.keys() == asked.keys()
    for key, out in outs.items():
        assert out.finished and out.prompt_token_ids == list(asked[key]["prompt_token_ids"])
        verify(out, wanted, truth)
    assert idle(llm)


def test_a_stream_that_is_left_leaves_nothing_behind(llm):
    params, _ = asking("all", LAYERS, max_tokens=40)
    (prompt,) = prompts([9])
    for _ in weir.engine(llm).stream((prompt, params) for _ in range(10**9)):
        break
    assert not llm.llm_engine.has_unfinished_requests() and idle(llm)
    bad = weir.params(sampling(1), capture=weir.Capture("resid_post", 99))
    with refused("capture[0].layers", "block 99"):
        list(weir.engine(llm).stream([(prompt, params), (prompt, bad)]))
    assert not llm.llm_engine.has_unfinished_requests() and idle(llm)


def test_interventions_of_all_requests_and_workers_are_at_hand(llm):
    engine = weir.engine(llm)
    add = weir.Add(torch.ones(engine.capabilities.d_model), 1)
    weir.set_global(llm, add)
    try:
        assert len(engine.interventions) == 1 and not engine.reads_every_request
    finally:
        weir.clear_global(llm)
    assert engine.interventions == ()
    assert engine.weights() == engine.weights() and engine.has_first_weights()
    (usage,) = engine.call_workers("weir_usage")
    assert usage["kept_bytes"] == 0
    with refused("llm", "int is no engine that Weir serves"):
        weir.engine(3)
