"""Every intervention, at every kind of position, against transformers; `test_families` has the cases of each model."""

from __future__ import annotations

import copy

import pytest
import torch

import vllm_weir as weir
from tests.support.check import expected_positions
from tests.support.measure import alike, rel_err, rounding
from tests.support.steered import (
    _apply,
    check,
    chunks,
    of_layer,
    prompt,
    same_answers,
    sampling,
    tokens,
    vectors,
)
from vllm_weir.schema.positions import Positions

pytestmark = pytest.mark.engine("steering")
EVERYTHING = [weir.Capture("resid_post"), weir.Capture("resid_pre")]
SELECTORS = (
    "all",
    "prompt",
    "generated",
    "last_prompt",
    "sampled",
    4,
    [0, -2, 3],
    "2:30:3",
    "-3:",
    {"token_ids": list(range(0, 500, 2))},
    {"not_token_ids": list(range(0, 500, 3))},
)


def by_layer(v, d, layers, **where):
    """A vector of its own for each block."""
    if layers == "all":
        return weir.Add({2: v(d), 0: v(1, d)}, **where)
    blocks = [layers] if isinstance(layers, int) else layers[::-1]
    return weir.Add(v(len(blocks), d), blocks, per_layer=True, **where)


def one_of_each(v, d, **where):
    """name -> interventions, each kind and each of its options, at `where`."""
    n = Positions.parse(where["positions"]).count()
    rows = {
        "add row per position": lambda: [weir.Add(v(n, d), **where)],
        "add row per position, normed": lambda: [weir.Add(v(n, d), norm_match=True, scale=0.5, **where)],
        "replace row per position": lambda: [weir.Replace(v(n, d), alpha=0.7, **where)],
    }
    plain = {
        "add": lambda: [weir.Add(v(d), scale=1.5, **where)],
        "add normed": lambda: [weir.Add(v(d), scale=0.5, norm_match=True, **where)],
        "add, norm kept": lambda: [weir.Add(v(1, d), scale=4.0, keep_norm=True, **where)],
        "add normed, norm kept": lambda: [weir.Add(v(d), scale=0.5, norm_match=True, keep_norm=True, **where)],
        "add by layer": lambda: [by_layer(v, d, **where)],
        "ablate": lambda: [weir.Ablate(v(d), **where)],
        "ablate subspace": lambda: [weir.Ablate(v(4, d), **where)],
        "clamp value": lambda: [weir.Clamp(v(d), value=2.0, **where)],
        "clamp min": lambda: [weir.Clamp(v(d), min=0.5, **where)],
        "clamp max": lambda: [weir.Clamp(v(d), max=-0.5, **where)],
        "clamp both, half": lambda: [weir.Clamp(v(d), min=-0.1, max=0.1, strength=0.5, **where)],
        "replace": lambda: [weir.Replace(v(d), **where)],
        "replace half": lambda: [weir.Replace(v(d), alpha=0.5, **where)],
        "low rank": lambda: [weir.LowRank(v(4, d) / 10, v(4, d) / 10, v(4), **where)],
        "several": lambda: [
            weir.Add(v(d), **where),
            weir.Ablate(v(2, d), **where),
            weir.Clamp(v(d), value=1.0, **where),
            weir.Add(v(d), 2, 0.5, hook="resid_pre" if where["hook"] == "resid_post" else "resid_post"),
            weir.Replace(v(d), alpha=0.3, **where),
        ],
    }
    return {name: make() for name, make in (plain | rows if n else plain).items()}


def every_case(d):
    layers = ([1], [0, 2], "all")
    out = []
    for i, selector in enumerate(SELECTORS):
        for hook in ("resid_post", "resid_pre"):
            v = vectors(len(out))
            out += one_of_each(v, d, layers=layers[i % 3], hook=hook, positions=selector).values()
    return out


@pytest.mark.parametrize("hook", ["resid_post", "resid_pre"])
def test_before_and_after_differ_by_the_intervention(engine, hook):
    llm, oracle = engine
    cases = []
    for positions in ("all", [3, -1], "generated"):
        kinds = one_of_each(vectors(5), oracle.hidden_size, layers=1, hook=hook, positions=positions)
        cases += [(positions, name, case) for name, case in kinds.items() if name != "several"]
    runs = []
    for before in (True, False):
        capture = weir.Capture(hook, 1, before=before)
        params = [weir.params(sampling(5), capture=capture, interventions=case) for _, _, case in cases]
        runs.append(llm.generate([prompt(20, 2)] * len(cases), params, use_tqdm=False))
    changing = 0
    for (positions, name, case), before, after in zip(cases, *runs, strict=True):
        h, changed = before.activations[hook, 1], after.activations[hook, 1]
        at = expected_positions(positions, 20, 5)
        others = [p for p in range(24) if p not in at]
        assert torch.equal(h[others], changed[others]), name
        assert rel_err(changed[at], _apply(of_layer(case[0], 1, [1]), h[at])) <= rounding(1, 128), name
        changing += not torch.equal(changed[at], h[at])
    assert changing >= len(cases) - 3  # a bound may hold already


def test_resid_pre_is_seen_by_its_own_attention_and_not_by_the_block_before(engine):
    llm, oracle = engine
    case = [weir.Add(3 * vectors(1)(oracle.hidden_size), 2, hook="resid_pre", positions=[4])]
    steered, plain = (
        llm.generate(prompt(20), weir.params(sampling(1), capture=EVERYTHING, interventions=i), use_tqdm=False)[0]
        for i in (case, [])
    )
    check(steered, case, oracle)
    # Position 9 is not steered: only attention carries the change to it, and first in block 2.
    assert alike(steered.activations["resid_pre", 2][9], plain.activations["resid_pre", 2][9])
    assert (steered.activations["resid_post", 2][9] - plain.activations["resid_post", 2][9]).abs().max() > 1e-3
    # What block 1 gave is told apart from what block 2 was given.
    assert alike(steered.activations["resid_post", 1], plain.activations["resid_post", 1])
    assert not torch.equal(steered.activations["resid_pre", 2][4], plain.activations["resid_pre", 2][4])


@pytest.mark.parametrize("size", [None, 7])
def test_rows_before_the_steered_position_are_bit_identical(engine, size):
    """P = 30: within the prompt, in a later chunk, its last position, the first and a later generated one."""
    llm, oracle = engine
    vector = 4 * vectors(3)(oracle.hidden_size)

    def run(interventions):
        params = weir.params(sampling(8), capture=EVERYTHING, interventions=interventions)
        with chunks(llm, size):  # alone each time, so that the steps have the same shapes
            return llm.generate(prompt(30, 4), params, use_tqdm=False)[0]

    plain = run([])
    for at in (0, 13, 29, 30, 33):
        case = [weir.Add(vector, [0, 2], positions=at)]
        steered = run(case)
        check(steered, case, oracle)
        for site in plain.activations.sites:
            assert alike(plain.activations[site][:at], steered.activations[site][:at]), (site, at)
        assert not torch.equal(plain.activations["resid_post", 0][at], steered.activations["resid_post", 0][at])


def programs(d):
    """64 different lists of interventions."""
    out = []
    for k in range(64):
        v = vectors(1000 + k)
        where = {
            "layers": [k % 4],
            "hook": ("resid_post", "resid_pre")[k // 4 % 2],
            "positions": SELECTORS[k % len(SELECTORS)],
        }
        kinds = list(one_of_each(v, d, **where).values())
        out.append(kinds[k % len(kinds)])
    return out


def test_64_programs_in_one_batch(engine):
    llm, oracle = engine
    texts = [prompt(9 + k % 17, 300 + k) for k in range(64)]
    cases = programs(oracle.hidden_size)
    params = [weir.params(sampling(5), capture=EVERYTHING, interventions=case) for case in cases]
    for out, case in zip(llm.generate(texts, params, use_tqdm=False), cases, strict=True):
        check(out, case, oracle)
        ids, P = [*out.prompt_token_ids, *out.outputs[0].token_ids], len(out.prompt_token_ids)
        for item, sites in zip(case, out.receipt.steered, strict=True):
            assert set(sites.values()) == {len(expected_positions(item.positions.to_json(), P, 5, ids))}, item


def test_unsteered_neighbours_are_bit_identical(engine):
    llm, oracle = engine
    plain = sampling(6, logprobs=5)
    steered = [weir.params(plain, interventions=p) for p in programs(oracle.hidden_size)]
    prompts = [prompt(9 + k % 17, 500 + k) for k in range(128)]
    batches = []
    for asked in ([p for s in steered for p in (s, plain)], [plain] * 128):
        llm.reset_prefix_cache()
        batches.append(llm.generate(prompts, asked, use_tqdm=False))
    mixed, clean = batches
    for a, b in zip(mixed[1::2], clean[1::2], strict=True):
        assert same_answers([a], [b])
        assert a.activations is None and a.receipt is None
    assert sum(not same_answers([a], [b]) for a, b in zip(mixed[::2], clean[::2], strict=True)) >= 48


def test_what_changes_nothing_is_bit_identical_to_none(engine):
    llm, oracle = engine
    d, v = oracle.hidden_size, vectors(8)
    nothings = [
        weir.Add(torch.zeros(d), "all"),
        weir.Add(torch.zeros(3, d), "all", positions="0:3"),
        weir.Add({0: torch.zeros(d), 2: torch.zeros(1, d)}, keep_norm=True),
        weir.Add(v(d), "all", scale=0.0),
        weir.Add(v(d), "all", positions={"token_ids": [511]}),
        weir.Add(v(d), "all", positions={"not_token_ids": range(513)}),
        weir.Clamp(v(d), "all", value=3.0, strength=0.0),
        weir.Replace(v(d), "all", alpha=0.0),
        weir.Replace(v(2, d), "all", alpha=0.0, hook="resid_pre", positions=[3, 4]),
        weir.LowRank(torch.zeros(2, d), v(2, d), v(2), "all"),
    ]
    base = sampling(6, logprobs=5)

    def run(interventions):
        llm.reset_prefix_cache()
        params = weir.params(base, capture=EVERYTHING, interventions=interventions)
        return llm.generate(prompt(40, 6), params, use_tqdm=False)[0]

    none = run([])
    for nothing in [[n] for n in nothings] + [nothings]:
        out = run(nothing)
        assert same_answers([out], [none]), nothing
        for site in none.activations.sites:
            assert alike(out.activations[site], none.activations[site]), nothing
        assert all(not any(sites.values()) for sites in out.receipt.steered)
    llm.reset_prefix_cache()
    llm.generate(prompt(40, 6), sampling(1), use_tqdm=False)
    for nothing in nothings:  # what changes nothing shares the plain cache
        (out,) = llm.generate(prompt(40, 6), weir.params(base, interventions=nothing), use_tqdm=False)
        assert out.num_cached_tokens == 32, nothing


def test_one_sampling_params_steers_ten_times_and_stays_as_it_was(engine):
    llm, oracle = engine
    vector = vectors(9)(oracle.hidden_size)
    case = [weir.Add(vector, 1, 2.0), weir.Ablate(vector, 2, positions="generated")]
    mine = sampling(6, logprobs=1)
    mine.extra_args = {"somebody": [1, 2]}
    params = weir.params(mine, capture=weir.Capture("resid_post", 3, "sampled"), interventions=case)
    assert mine.extra_args == {"somebody": [1, 2]}
    before, kept, wire = vector.clone(), copy.deepcopy(params), copy.deepcopy(params.extra_args)
    lists = [prompt(20, 7)]
    outs = [llm.generate(lists, params, use_tqdm=False)[0] for _ in range(10)]
    assert lists == [prompt(20, 7)]
    assert torch.equal(vector, before)
    assert params.extra_args == wire
    kept.output_kind = params.output_kind  # vLLM's own doing
    assert params == kept
    for out in outs:
        check(out, case, oracle)
        assert list(out.outputs[0].token_ids) == list(outs[0].outputs[0].token_ids)
        assert rel_err(out.activations["resid_post", 3], outs[0].activations["resid_post", 3]) <= rounding()
        assert sum(n for sites in out.receipt.steered for n in sites.values()) + sum(out.receipt.shared) == 20 + 5 + 5
    (plain,) = llm.generate(lists, sampling(6), use_tqdm=False)
    assert list(plain.outputs[0].token_ids) == oracle.greedy(tokens(20, 7), 6)
    assert list(plain.outputs[0].token_ids) != list(outs[0].outputs[0].token_ids)


def test_token_selectors_and_rows_by_position_in_one_request(engine):
    """Which program a generated token gets hangs on the token, also beside an intervention with a row per position."""
    llm, oracle = engine
    d, v = oracle.hidden_size, vectors(12)
    odd, low = {"token_ids": list(range(1, 500, 2))}, {"token_ids": list(range(250))}
    cases = [
        [weir.Add(2 * v(d), 1, positions=odd), weir.Clamp(v(d), 2, value=2.0, positions=low)],
        [weir.Add(v(4, d), 1, positions="15:19"), weir.Add(2 * v(d), 1, positions=odd)],
        [weir.Replace(v(2, d), 0, positions=[-1, 16]), weir.Ablate(v(d), "all", positions=low), weir.Add(v(d), 2)],
    ]
    for case in cases:
        params = weir.params(sampling(10), capture=EVERYTHING, interventions=case)
        for out in llm.generate([prompt(15, s) for s in (1, 2, 3)], params, use_tqdm=False):
            check(out, case, oracle)
            ids = out.prompt_token_ids + list(out.outputs[0].token_ids)
            for item, sites in zip(case, out.receipt.steered, strict=True):
                at = expected_positions(item.positions.to_json(), 15, 10, ids)
                assert set(sites.values()) == {len(at)}, item
