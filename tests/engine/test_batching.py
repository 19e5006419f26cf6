"""A ring of rows smaller than the batch, or than a prompt."""

from __future__ import annotations

import pytest

import vllm_weir as weir
from tests.engine.common import asking, assert_nothing_is_held, directory, frontend, prompts, sampling, verify
from tests.engine.test_compress import asked as compressed
from tests.engine.test_compress import decoded
from tests.support.engines import get_llm
from tests.support.references import reference
from tests.support.steered import check, vectors

pytestmark = pytest.mark.engine
RING = {"buffer_bytes": 1 << 16}
CAPTURE = [weir.Capture("resid_post"), weir.Capture("resid_pre")]


@pytest.fixture
def truth(root):
    return reference(directory(root))


@pytest.fixture
def llm(root):
    """128 ring rows; the tables have room for one program."""
    return get_llm(directory(root), additional_config={"weir": RING | {"max_programs": 1}})


def test_a_ring_smaller_than_the_batch(llm, truth):
    """8 rows a token: steps are cut to 16 tokens, rows wait for room, all of them arrive."""
    assert frontend(llm).engine.capabilities.ring_rows == 128
    wanted = {(hook, layer): ["all"] for hook in ("resid_post", "resid_pre") for layer in range(4)}
    params = weir.params(sampling(6), capture=CAPTURE)
    outs = llm.generate(prompts([60] * 12 + [1, 2, 3, 4] * 6), params, use_tqdm=False)
    for out in outs:
        verify(out, wanted, truth)
    # Records take an eighth of a row's room.
    outs = llm.generate(prompts([100] * 10), compressed("all", "full8", 30), use_tqdm=False)
    for out in outs:
        decoded(out, "full8", truth)
    del out, outs
    assert_nothing_is_held(llm)


def test_a_ring_smaller_than_the_prompt_of_a_request_that_waited_for_the_tables(llm, truth):
    """Its rows bound the steps from when it is let in, not only those before."""
    cases = [[weir.Add(vectors(70 + k)(truth.hidden_size), 1, positions=[40])] for k in range(3)]
    params = [weir.params(sampling(4), capture=CAPTURE, interventions=case) for case in cases]
    for out, case in zip(llm.generate(prompts([60, 50, 61]), params, use_tqdm=False), cases, strict=True):
        check(out, case, truth)
        assert set(out.receipt.captured.values()) == {len(out.prompt_token_ids) + 3}
    del out
    assert_nothing_is_held(llm)


def test_a_capture_that_cannot_fit_the_ring_is_refused(root, truth):
    """Without chunked prefill a whole prompt is one step: what would not fit is refused, the rest is served."""
    settings = {"enable_chunked_prefill": False, "max_num_batched_tokens": 256}
    llm = get_llm(directory(root), additional_config={"weir": RING}, **settings)
    params, wanted = asking("all", truth.num_layers)
    with pytest.raises(weir.WeirError, match="buffer_bytes") as e:
        llm.generate(prompts([15]), params, use_tqdm=False)
    assert e.value.field == "capture"
    for out in llm.generate(prompts([14, 13, 5, 14]), params, use_tqdm=False):
        verify(out, wanted, truth)
    # Prompts that record nothing are longer than a step of those behind them may be.
    (alone,) = llm.generate(prompts([100]), sampling(4), use_tqdm=False)
    asked = [sampling(4), params, params, sampling(4), params]
    first, *others = llm.generate(prompts([100, 14, 14, 90, 13]), asked, use_tqdm=False)
    assert first.outputs[0].token_ids == alone.outputs[0].token_ids and len(others[2].outputs[0].token_ids) == 4
    for out in (others[0], others[1], others[3]):
        verify(out, wanted, truth)
