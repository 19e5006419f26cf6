"""What the caller passes in stays as it was, and can be used again."""

from __future__ import annotations

import copy

import pytest

import vllm_weir as weir
from tests.engine.common import asking, prompts, same_rows, sampling, verify

pytestmark = pytest.mark.engine("default")
ALL = {"stop": ["w499999"], "logit_bias": {3: -1.0}, "extra_args": {"mine": {"deep": [1]}}}


def picture(params):
    """Every field, deeply copied."""
    return copy.deepcopy({name: getattr(params, name) for name in params.__struct_fields__})


def test_params_copies_its_argument():
    base = sampling(**ALL)
    before = picture(base)
    made = weir.params(base, capture=weir.Capture("resid_post", [1]))
    assert picture(base) == before
    assert made is not base and made.extra_args["mine"] == {"deep": [1]} and "weir" in made.extra_args
    assert weir.params(made, capture=[]).extra_args["weir"]["capture"] == [] != made.extra_args["weir"]["capture"]


@pytest.mark.parametrize("lens", [False, True], ids=["weir", "lens"])
def test_sampling_params_are_reused_ten_times(llm, truth, lens):
    from vllm.sampling_params import RequestOutputKind

    # vLLM's own LLM.generate writes this field of its caller's object; nothing else may change.
    fixed = ALL | {"output_kind": RequestOutputKind.FINAL_ONLY}
    if lens:
        params = sampling(**fixed | {"extra_args": {"output_residual_stream": [1, 3]}})
        wanted = {("resid_post", layer): ["all"] for layer in (1, 3)}
    else:
        params, wanted = asking("all", truth.num_layers, n=2, temperature=1.0, seed=3, **fixed)
    before, first = picture(params), None
    for _ in range(10):
        batch = prompts([12, 30])
        held = copy.deepcopy(batch)
        outs = llm.generate(batch, params, use_tqdm=False)
        assert batch == held
        assert picture(params) == before
        for out in outs:
            for completion in out.outputs:
                verify(out, wanted, truth, completion)
        first = first or outs
        for a, b in zip(outs, first, strict=True):
            for x, y in zip(a.outputs, b.outputs, strict=True):
                assert x.token_ids == y.token_ids
                same_rows(x.activations, y.activations)


def test_one_object_for_a_whole_batch_and_other_params_between(llm, truth):
    params, wanted = asking([0, -1], truth.num_layers)
    other, other_wanted = asking("generated", truth.num_layers)
    for _ in range(3):
        for out in llm.generate(prompts([5] * 9), params, use_tqdm=False):
            verify(out, wanted, truth)
        for out in llm.generate(prompts([5] * 2), other, use_tqdm=False):
            verify(out, other_wanted, truth)
