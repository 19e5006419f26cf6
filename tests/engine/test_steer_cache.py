"""Steering and the prefix cache: what is shared, what is not; re-registered names, values that overflow."""

from __future__ import annotations

import itertools

import pytest
import torch

import vllm_weir as weir
from tests.support.engines import get_llm
from tests.support.measure import rel_err, rounding
from tests.support.named import ENGINES
from tests.support.steered import check, chunks, directory, idle, prompt, sampling, scheduler, tokens, truth, vectors

pytestmark = pytest.mark.engine("steering")
P = 100  # three blocks and four tokens
CAPTURE = weir.Capture("resid_post", positions="sampled")  # starts at the prompt's last token: hits up to 96


def conditions(d):
    """name -> (interventions, undergone by all requests?, what they do to the prompt's three blocks)."""
    v = vectors(21)
    a, b = 2 * v(d), 2 * v(d)
    return {
        "clean": ([], False, (0, 0, 0)),
        "A": ([weir.Add(a, 1)], False, ("A", "A", "A")),
        "B": ([weir.Add(b, 1)], False, ("B", "B", "B")),
        "A in generation": ([weir.Add(a, 1, positions="generated")], False, (0, 0, 0)),
        "A from 64": ([weir.Add(a, 1, positions="64:")], False, (0, 0, "A")),
        "A for all": ([weir.Add(a, 1)], True, ("A", "A", "A")),
        "nothing": ([weir.Add(a, 1, scale=0.0)], False, (0, 0, 0)),
    }


def run(llm, condition, max_tokens=6, ids=None):
    interventions, everybody, _ = condition
    params = weir.params(sampling(max_tokens), capture=CAPTURE, interventions=() if everybody else interventions)
    if everybody:
        weir.set_global(llm, interventions)
    try:
        (out,) = llm.generate({"prompt_token_ids": ids or tokens(P, 5)}, params, use_tqdm=False)
    finally:
        weir.clear_global(llm)
    return out


def shared(first, second):
    same = 0
    for one, other in zip(first, second, strict=True):
        if one != other:
            break
        same += 32
    return same


def test_every_condition_after_every_other(engine):
    llm, oracle = engine
    every = conditions(oracle.hidden_size)
    cold = {}
    for name, condition in every.items():
        llm.reset_prefix_cache()
        cold[name] = run(llm, condition)
        assert cold[name].num_cached_tokens == 0
        check(cold[name], condition[0], oracle)
    distinct = {tuple(cold[n].outputs[0].token_ids) for n in ("clean", "A", "B", "A in generation", "A from 64")}
    assert len(distinct) == 5  # else nothing below could fail
    for first, second in itertools.product(every, repeat=2):
        llm.reset_prefix_cache()
        run(llm, every[first])
        out = run(llm, every[second])
        assert out.num_cached_tokens == shared(every[first][2], every[second][2]), (first, second)
        assert out.outputs[0].token_ids == cold[second].outputs[0].token_ids, (first, second)
        for site in out.activations.sites:
            assert rel_err(out.activations[site], cold[second].activations[site]) <= rounding(), (first, second)
        for sites, cached, item in zip(out.receipt.steered, out.receipt.shared, every[second][0], strict=True):
            if sites:
                start = {"all": 0, "generated": P, "64:": 64}[item.positions.to_json()]
                assert cached == max(0, out.num_cached_tokens - start)
                assert set(sites.values()) == {P + 5 - start - cached}


def test_kv_of_generated_tokens_has_keys_too(engine):
    """The second prompt holds the first one's answer: a block written while steered is not a clean one."""
    llm, oracle = engine
    every = conditions(oracle.hidden_size)
    for first, second, want in (
        ("A in generation", "clean", 96),
        ("clean", "clean", 128),
        ("A", "A", 128),
        ("A in generation", "A in generation", 96),  # for the second request position 100 is its prompt's
        ("clean", "A in generation", 128),
        ("A", "A in generation", 0),
    ):
        llm.reset_prefix_cache()
        # 100 + 40 tokens: block 3 ends at 128 and is partly prompt, partly generated.
        made = list(run(llm, every[first], max_tokens=40).outputs[0].token_ids)
        out = run(llm, every[second], ids=tokens(P, 5) + made)
        assert out.num_cached_tokens == want, (first, second)
        check(out, every[second][0], oracle)


def test_a_name_registered_again_means_the_new_vector(engine):
    llm, oracle = engine
    v = vectors(22)
    old, new = 2 * v(oracle.hidden_size), 2 * v(oracle.hidden_size)
    params = weir.params(sampling(6), capture=CAPTURE, interventions=weir.Add("mood", 1))
    llm.reset_prefix_cache()
    outs = []
    for vector, cached in ((old, 0), (old, 96), (new, 0), (old, 96), (new, 96)):
        weir.register(llm, "mood", vector)
        (out,) = llm.generate(prompt(P, 5), params, use_tqdm=False)
        assert out.num_cached_tokens == cached
        check(out, [weir.Add(vector, 1)], oracle)
        outs.append(list(out.outputs[0].token_ids))
    assert outs[0] == outs[1] == outs[3] != outs[2] == outs[4]
    # The same content shares, however it is referred to.
    digest = weir.register(llm, "other name", new)
    for reference in ("other name", digest, new):
        (out,) = llm.generate(
            prompt(P, 5), weir.params(sampling(6), interventions=weir.Add(reference, 1)), use_tqdm=False
        )
        assert out.num_cached_tokens == 96
    weir.unregister(llm, "mood")
    weir.unregister(llm, "other name")


def test_many_conditions_at_once_on_one_prompt(engine):
    """Equal prompts under different interventions, in one batch, on a warm and on a cold cache."""
    llm, oracle = engine
    cases = [c for c, everybody, _ in conditions(oracle.hidden_size).values() if not everybody] * 3
    params = [weir.params(sampling(6), capture=CAPTURE, interventions=c) for c in cases]
    llm.reset_prefix_cache()
    for _ in range(2):
        for out, case in zip(llm.generate([prompt(P, 5)] * len(cases), params, use_tqdm=False), cases, strict=True):
            check(out, case, oracle)
    assert idle(llm)


def test_resumed_with_more_of_its_prompt_in_the_cache_than_it_had_computed():
    """An equal request went first meanwhile; what that one computed is steered as this one's."""
    model_dir = directory()
    settings = {"scheduling_policy": "priority", "additional_config": {"weir": {"timeout": 20.0}}}
    llm, oracle = get_llm(model_dir, **ENGINES["steering"].arguments, **settings), truth(model_dir)
    core, case, outs = scheduler(llm), [weir.Add(vectors(24)(oracle.hidden_size), 1, 2.0)], {}
    steered = weir.params(sampling(5), capture=weir.Capture("resid_post", 3, "sampled"), interventions=case)
    with chunks(llm, 33):
        llm.llm_engine.add_request("low", prompt(70), steered, priority=2)
        llm.llm_engine.step()
        (low,) = core.requests.values()
        assert low.num_computed_tokens == 33
        llm.llm_engine.add_request("high", prompt(70), steered, priority=0)
        llm.reset_prefix_cache(reset_running_requests=True)
        while llm.llm_engine.has_unfinished_requests():
            outs |= {out.request_id: out for out in llm.llm_engine.step() if out.finished}
    assert low.num_preemptions == 1
    for out in outs.values():
        check(out, case, oracle)
        assert out.receipt.steered == ({("resid_post", 1): 74},)
    assert idle(llm)


@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_request_whose_values_overflow_leaves_nothing_in_the_cache(caching):
    """Blocks of the KV cache come with what was in them, and zero times NaN is NaN."""
    more = {} if caching else {"enable_prefix_caching": False}
    llm, oracle = get_llm(directory(), **ENGINES["steering"].arguments, **more), truth(directory())
    ones = torch.ones(oracle.hidden_size)
    for case in (weir.Add(ones, 0, scale=3e38), weir.Add(ones, "all", scale=3e38, norm_match=True)):
        llm.generate(prompt(60, 2), weir.params(sampling(6), interventions=case), use_tqdm=False)
        for seed in (2, 3):
            (out,) = llm.generate(prompt(40, seed), sampling(6, logprobs=1), use_tqdm=False)
            assert list(out.outputs[0].token_ids) == oracle.greedy(tokens(40, seed), 6)
            assert all(torch.tensor(p.logprob).isfinite() for step in out.outputs[0].logprobs for p in step.values())
