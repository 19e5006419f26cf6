"""Vectors of every shape on a real engine: one for all positions, rows by position, vectors by layer; norms kept."""

from __future__ import annotations

import json

import pytest
import torch

import vllm_weir as weir
from tests.support.measure import alike, rel_err, rounding
from tests.support.steered import check, chunks, idle, prompt, sampling, vectors

pytestmark = pytest.mark.engine("steering")
EVERYTHING = [weir.Capture("resid_post"), weir.Capture("resid_pre")]
BLOCKS, D = 4, 128
POST = [weir.Site("resid_post", layer) for layer in range(BLOCKS)]


def run(llm, interventions, length=11, seed=0, count=5, capture=EVERYTHING):
    """One request's output; `length` tokens of prompt and `count` generated."""
    params = weir.params(sampling(count), capture=capture, interventions=interventions)
    return llm.generate(prompt(length, seed), params, use_tqdm=False)[0]


def test_a_difference_of_captures_steers_every_position(engine):
    """What `reduce` or `"last_prompt"` returns is [1, d], and so is the difference of two."""
    llm, oracle = engine
    rows = []
    for capture in (weir.Capture(layers=2, positions="last_prompt"), weir.Capture(layers=2, reduce="mean")):
        one, other = (run(llm, [], 11, seed, capture=capture).activations["resid_post", 2] for seed in (1, 2))
        rows.append(2 * (one - other))
    for row in rows:
        assert row.shape == (1, D)
        out = run(llm, weir.Add(row, layers=2))
        check(out, [weir.Add(row[0], layers=2)], oracle)
        assert out.receipt.steered == ({POST[2]: 15},) and out.receipt.shared == (0,)
        by_key = weir.params(sampling(5), capture=EVERYTHING)
        by_key.extra_args["apply_steering_vectors"] = [weir.SteeringVector(row[None], [2])]
        (lens,) = llm.generate(prompt(11), by_key, use_tqdm=False)
        assert lens.receipt.steered == out.receipt.steered
        assert alike(lens.activations["resid_post", 3], out.activations["resid_post", 3])


def test_one_row_replaces_all_that_is_selected(engine):
    llm, oracle = engine
    row = run(llm, [], seed=3, capture=weir.Capture(layers=2, positions="last_prompt")).activations["resid_post", 2]
    out = run(llm, weir.Replace(row, 2, positions=[1, 2]))
    check(out, [weir.Replace(row[0], 2, positions=[1, 2])], oracle)
    assert out.receipt.steered == ({POST[2]: 2},)
    after = out.activations["resid_post", 2]
    assert rel_err(after[1:3], row.expand(2, D)) <= 1e-6 and rel_err(after[3], row[0]) > 0.1
    case = [weir.Clamp(row, 1, value=2.0), weir.Ablate(row, 3, positions=[0, -1]), weir.Add(row, 0, norm_match=True)]
    out = run(llm, case)
    check(out, case, oracle)
    assert [list(sites.values()) for sites in out.receipt.steered] == [[15], [2], [15]]


@pytest.mark.parametrize("size", [None, 3])
def test_rows_for_the_whole_prompt(engine, size):
    llm, oracle = engine
    length = 11
    rows = vectors(5)(length, D)
    case = [weir.Replace(rows, 1, positions="prompt"), weir.Add(rows[:3], 2, positions="4:7", keep_norm=True)]
    with chunks(llm, size):
        out = run(llm, case, length)
    check(out, case, oracle)
    assert out.receipt.steered == ({POST[1]: length}, {POST[2]: 3})
    assert rel_err(out.activations["resid_post", 1][:length], rows) <= 1e-6
    for other in (length - 1, length + 1):
        with pytest.raises(weir.WeirError, match=f"{length} rows for {other} positions") as caught:
            run(llm, case, other)
        assert caught.value.field == "interventions[0].positions"


KINDS = {
    "add": lambda v, **m: weir.Add(v, scale=2.0, **m),
    "add normed, norm kept": lambda v, **m: weir.Add(v, scale=0.5, norm_match=True, keep_norm=True, **m),
    "replace": lambda v, **m: weir.Replace(v, alpha=0.3, **m),
    "clamp": lambda v, **m: weir.Clamp(v, value=3.0, **m),
    "ablate": lambda v, **m: weir.Ablate(v, **m),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_by_layer_equals_an_intervention_for_each_to_the_bit(engine, kind):
    llm, oracle = engine
    make, stack = KINDS[kind], vectors(7)(BLOCKS, D)
    each = [make(stack[n], layers=n) for n in range(BLOCKS)]
    # A name resolves when the request is admitted.
    weir.register(llm, "stack", stack)
    forms = [
        make(stack, per_layer=True),
        make(stack[[2, 0, 3, 1]], layers=[2, 0, 3, 1], per_layer=True),
        make({n: stack[n] for n in range(BLOCKS)}),
        make("stack", per_layer=True),
    ]
    llm.reset_prefix_cache()
    want = run(llm, each, 40)
    check(want, each, oracle)
    assert want.receipt.steered == tuple({site: 44} for site in POST)
    for form in forms:
        llm.reset_prefix_cache()
        out = run(llm, form, 40)
        assert out.outputs[0].token_ids == want.outputs[0].token_ids
        for site in want.activations.sites:
            assert torch.equal(out.activations[site], want.activations[site]), (form, site)
        assert out.receipt.steered == (dict.fromkeys(POST, 44),) and out.receipt.shared == (0,)
    weir.unregister(llm, "stack")
    check(run(llm, forms[0], 40), [forms[0]], oracle)


def test_a_matrix_by_layer(engine):
    """[layers, n, d]: rows for n positions, or directions that go together."""
    llm, oracle = engine
    v = vectors(8)
    case = [
        weir.Add(v(2, 3, D), [3, 1], positions=[9, 2, 40], per_layer=True),
        weir.Replace({0: v(3, D), 2: v(1, D)}, positions="2:5"),
        weir.Ablate(v(2, 3, D), [0, 2], per_layer=True, positions="generated"),
        weir.LowRank(v(2, 2, D) / 10, v(2, 2, D) / 10, v(2, 2), [1, 3], per_layer=True),
    ]
    with chunks(llm, 4):
        out = run(llm, case)
    check(out, case, oracle)
    counts = [{site.layer: n for site, n in sites.items()} for sites in out.receipt.steered]
    assert counts == [{1: 2, 3: 2}, {0: 3, 2: 3}, {0: 4, 2: 4}, {1: 15, 3: 15}]
    assert idle(llm)


def test_spellings_that_do_the_same_share_the_prefix_cache(engine):
    llm, _ = engine
    a, b = vectors(9)(2, D)
    alike = [
        [weir.Add(a, [1, 3], 2.0), weir.Ablate(b, 0)],
        [weir.Add(a[None], [3, 1], 2.0), weir.Ablate({0: b})],
        [weir.Add({3: a, 1: a[None]}, scale=2.0), weir.Ablate(b[None], [0], per_layer=True)],
        [weir.Add(torch.stack([a, a]), [3, 1], 2.0, per_layer=True), weir.Ablate({"0": b.tolist()})],
    ]
    cached = [run(llm, case, 70, capture=[]).num_cached_tokens for case in alike]
    assert cached == [0, 64, 64, 64]
    each = [[weir.Add({1: a, 2: b})], [weir.Add(a, 1), weir.Add(b, 2)], [weir.Add({1: b, 2: a})], []]
    assert [run(llm, case, 70, capture=[]).num_cached_tokens for case in each] == [0, 64, 0, 0]
    (out,) = llm.generate(prompt(70), weir.params(sampling(3), interventions=each[0]), use_tqdm=False)
    assert out.receipt.steered == ({POST[1]: 8, POST[2]: 8},) and out.receipt.shared == (64,)


@pytest.mark.parametrize("norm_match", [False, True])
def test_norms_are_kept(engine, norm_match):
    llm, oracle = engine
    v = vectors(10)(D)
    case = [weir.Add(v, 2, 5.0, norm_match=norm_match, keep_norm=True)]
    before, after = (
        run(llm, case, capture=weir.Capture(layers=2, before=first)).activations["resid_post", 2]
        for first in (True, False)
    )
    check(run(llm, case), case, oracle)
    assert rel_err(after.norm(dim=1), before.norm(dim=1)) <= rounding(1, D)
    assert (after @ v > before @ v).all()
    assert (after - before).norm(dim=1).min() > 0.1 * before.norm(dim=1).min()


def test_a_stack_that_is_not_said_to_be_one_is_refused(engine):
    llm, oracle = engine
    stack = vectors(11)(BLOCKS, D)
    for make in (lambda: weir.Add(stack), lambda: weir.Replace(stack[:2], [1, 2], positions="generated")):
        with pytest.raises(weir.WeirError, match=r"is open.*per_layer=True or \{layer: vector\}"):
            make()
    weir.register(llm, "stack", stack)
    weir.register(llm, "deep", stack[:, None])
    wire = {"op": "add", "vector": {str(n): "deep" for n in range(BLOCKS)}}
    for case, field in (
        (weir.Add("stack"), "interventions[0].positions"),
        (weir.Add("stack", [1, 2], per_layer=True), "interventions[0].vector"),
        (weir.Clamp("stack", value=1.0), "interventions[0].direction"),
        (weir.Add("deep"), "interventions[0].vector"),
        (wire, "interventions[0].vector.0"),
        (weir.Add({0: stack[0], BLOCKS: stack[1]}), "interventions[0].vector"),
    ):
        with pytest.raises(weir.WeirError) as caught:
            run(llm, case)
        assert caught.value.field == field, case
    for form in ("stack", "deep"):
        check(run(llm, weir.Add(form, per_layer=True)), [weir.Add(stack, per_layer=True)], oracle)
    weir.unregister(llm, "stack"), weir.unregister(llm, "deep")


def test_vectors_by_layer_for_every_request(engine):
    llm, oracle = engine
    stack = vectors(12)(BLOCKS, D)
    weir.register(llm, "stack", stack)
    always = [weir.Add("stack", per_layer=True), weir.Add({1: stack[:1]}, keep_norm=True, positions="generated")]
    try:
        weir.set_global(llm, always)
        weir.unregister(llm, "stack")
        own = [weir.Replace(stack[:2], 3, positions=[5, 1])]
        out = run(llm, own)
        check(out, [weir.Add(stack, per_layer=True), always[1], *own], oracle)
        assert [list(sites.values()) for sites in out.receipt.steered] == [[15] * BLOCKS, [4], [2]]
        with pytest.raises(weir.WeirError, match="is open"):
            weir.set_global(llm, json.loads(json.dumps([always[1].to_json() | {"vector": stack[:2].tolist()}])))
    finally:
        weir.clear_global(llm)
