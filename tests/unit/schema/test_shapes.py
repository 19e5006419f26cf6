"""Which vector acts where: one for all positions, rows by position, and vectors by layer."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import vllm_weir as weir
from tests.unit.frontends import frontend_of
from tests.unit.refusals import pairs
from tests.unit.refusals import refused as expect_refusal
from tests.unit.schema.test_lowering import FACTS, LAYERS, Bench, D, admitted
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.admission.cache import MAX_KEY_BYTES, admission_key
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.instructions import KEEP_NORM
from vllm_weir.schema.intervention_kinds import parse_intervention
from vllm_weir.schema.request import RequestSpec
from vllm_weir.schema.taps import tap_of

DRAW = torch.Generator().manual_seed(3)
A, B, C = (torch.randn(D, generator=DRAW) for _ in range(3))
ROWS = torch.stack([A, B, C])


def does(*items, lookup=None):
    """What the engine is told to do, in order."""
    return admit({"weir": RequestSpec((), items)}, FACTS, **({"lookup": lookup} if lookup else {})).effective


def refused(call, field):
    """The message of the refusal."""
    with expect_refusal(field) as caught:
        call()
    return caught.value.message


# --- one vector ---


KINDS = {
    "add": lambda v, **more: weir.Add(v, scale=2.0, **more),
    "add normed": lambda v, **more: weir.Add(v, scale=2.0, norm_match=True, **more),
    "add, norm kept": lambda v, **more: weir.Add(v, scale=2.0, keep_norm=True, **more),
    "replace": lambda v, **more: weir.Replace(v, alpha=0.5, **more),
    "clamp": lambda v, **more: weir.Clamp(v, min=0.5, **more),
    "ablate": lambda v, **more: weir.Ablate(v, **more),
}


def test_tiers_take_a_row_as_a_matrix():
    row, vector = [A.tolist()], A.tolist()
    for fields in (
        lambda v: {"steering_vectors": {"post_mlp": {1: v}}},
        lambda v: {"decode_steering_vectors": {"post_mlp": {1: {"vector": v, "scale": 2.0}}}},
        lambda v: {"prefill_steering_clamps": {"post_mlp": {1: [{"vector": v, "value": 2.0}]}}},
    ):
        assert does(*weir.from_tiers(**fields(row))) == does(*weir.from_tiers(**fields(vector)))
    message = refused(lambda: weir.from_tiers({"post_mlp": {1: ROWS.tolist()}}), "steering_vectors.post_mlp.1.vector")
    assert message == "expected one vector, got 3 rows"


def test_one_direction_to_project_on_may_be_a_matrix():
    def postprocess(directions):
        capture = weir.Capture(layers=1, project=directions)
        found = admit({"weir": RequestSpec((capture,))}, FACTS, lookup=lambda ref, _field: names[ref])
        return found.spec.postprocess, sorted(found.rows)

    names = {"row": A[None].numpy(), "stack": ROWS[None].numpy()}
    assert postprocess(A) == postprocess(A[None]) == postprocess("row")
    assert "[1, 3, 8]" in refused(lambda: postprocess("stack"), "capture.project")


# --- rows by position ---


BY_TOKEN = [{"token_ids": [1]}, {"not_token_ids": [1]}, {"special": False}]


BY_TOKEN = [{"token_ids": [1]}, {"not_token_ids": [1]}]


@pytest.mark.parametrize("kind", ["add", "add normed", "add, norm kept", "replace"])
def test_open_selectors_are_refused_at_once(kind):
    for positions in ("all", "generated", "sampled", "2:", "::2", "-3:", *BY_TOKEN, {"special": False}):
        with expect_refusal("intervention.positions", "3 rows.* is open.*list 3 positions") as at_once:
            KINDS[kind](ROWS, positions=positions)
        assert "per_layer=True or {layer: vector}" in at_once.value.message
        if positions != {"special": False}:
            by_name = KINDS[kind]("rows", layers=1, positions=positions)
            with expect_refusal("intervention.positions") as later:
                does(by_name, lookup=lambda ref, _field: ROWS.numpy())
            assert later.value.message == at_once.value.message


def test_counts_that_differ_are_refused_at_once_where_they_are_known():
    for positions in ([1], [4, 2], [5, 5, 2], [0, -1], "1:3", "0:10:2", ":4", "-3:-1", "last_prompt", 7):
        with expect_refusal("intervention.positions", "^[^:]*: 3 rows for .*per_layer=True") as e:
            weir.Add(ROWS, 1, positions=positions)
        assert "with a prompt" not in e.value.message
        assert not does(weir.Add(A, 1, positions=positions))[0].per_position


@pytest.mark.parametrize(
    "positions, fits, other, count",
    [
        ("prompt", 3, 5, 5), (":-2", 5, 4, 2), ("2:-1", 6, 5, 2), ("-2:4", 3, 4, 2), ([0, -2, 3], 4, 5, 2),
        ([-9, 1, 2], 12, 8, 2), ("0:3", 2, None, 3), ([9, 1, 2], 2, None, 3),
    ],
)  # fmt: skip
def test_counts_that_the_prompt_decides_are_checked_with_it(positions, fits, other, count):
    """`fits`: a prompt's length with three positions; `other`: one with `count` of them."""
    found = admitted(weir.Add(ROWS, 1, positions=positions))
    Bench().enter("r", found, fits)
    if other is not None:
        message = refused(lambda: Bench().enter("r", found, other), "intervention.positions")
        assert message.startswith(f"3 rows for {count} positions with a prompt of {other} tokens")


def test_a_desk_checks_every_request_s_count():
    """Also of rows that change nothing."""
    frontend = frontend_of(FACTS)
    for item in (weir.Replace(ROWS, 1, positions="prompt"), weir.Add(0 * ROWS, 1, positions="prompt")):
        asked = {"weir": {"v": 1, "interventions": [item.to_json()]}}
        frontend.admit("fits", asked, [1, 2, 3], 3, 4)
        for length in (1, 2, 4):
            with expect_refusal("interventions[0].positions", f"3 rows for {length} .* prompt of {length} tokens"):
                frontend.admit("r", asked, [1] * length, length, 4)
    frontend.close()


# --- vectors by layer ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hook", ["resid_post", "resid_pre"])
def test_vectors_by_layer_do_what_single_ones_do(kind, hook):
    make = lambda v, **more: KINDS[kind](v, hook=hook, **more)
    want = does(*(make(v, layers=n) for n, v in ((0, A), (1, B), (2, C))))
    names = frontend_of(None).names
    for name, value in {"stack": ROWS.numpy(), "deep": ROWS.numpy()[:, None], "a": A, "b": B[None]}.items():
        names.put_vector(name, value)
    forms = [
        make({0: A, 1: B, 2: C}),
        make({2: C[None], "0": A.tolist(), np.int64(1): B.numpy()}),
        make({0: "a", 1: {"ref": "b"}, 2: C}),
        make({0: A, 1: B, 2: C}, layers=[2, 1, 0]),
        make(ROWS, per_layer=True),
        make(ROWS[:, None], per_layer=True),
        make(ROWS[[2, 0, 1]], layers=[2, 0, 1], per_layer=True),
        make("stack", per_layer=True),
        make("deep", layers=range(3), per_layer=True),
    ]
    for form in forms:
        assert does(form, lookup=names.vectors.find) == want, form
        sent = RequestSpec.parse(json.dumps(RequestSpec((), (form,)).to_json())).interventions
        assert does(*sent, lookup=names.vectors.find) == want, form
        assert does(form.with_arrays(names.vectors.find)) == want


def test_layers_that_do_the_same_are_one_move():
    (move,) = does(weir.Add({2: A, 0: A[None]}))
    assert move == does(weir.Add(A, [0, 2]))[0]
    first, second = does(weir.Add({0: A, 1: B, 2: A}))
    assert (first.layers, second.layers) == ((0, 2), (1,))


def test_rows_by_position_may_differ_by_layer():
    each = {0: ROWS[:2], 1: torch.stack([C, torch.zeros(D)]), 2: B}
    want = does(*(weir.Replace(v, layer, positions=[4, 1]) for layer, v in each.items()))
    assert does(weir.Replace(each, positions=[4, 1])) == want and [m.per_position for m in want] == [True, True, False]
    assert refused(lambda: weir.Replace(each, positions=[4]), "intervention.positions").startswith("2 rows for 1 pos")
    assert "is open" in refused(lambda: weir.Replace(each), "intervention.positions")
    every = lambda positions: weir.Add(torch.stack([ROWS] * LAYERS), per_layer=True, positions=positions)
    assert refused(lambda: every([4]), "intervention.positions").startswith("3 rows")
    found = admitted(every("prompt"))
    assert len(found.by_position) == 1
    Bench().enter("r", found, 3)
    refused(lambda: Bench().enter("r", found, 4), "intervention.positions")


def add(vector, *layers, **more):
    return lambda: weir.Add(vector, *layers, **more)


WRONG = {
    "vector.1": [add({1: A, "1": B})],
    "vector.-1": [add({-1: A})],
    "vector.-2": [add({"-2": A})],
    "vector.1000000000000": [add({10**12: A})],
    "vector.a int too large to show": [add({10**5000: A})],
    "vector.x": [add({1: A, "x": B})],
    "vector.None": [add({1: A, None: C})],
    "vector.2": [add({1: A, 2: [float("nan")] * D})],
    "vector.2.3": [add({1: A, 2: {3: B}})],
    "vector": [
        *(add({}), add({1: A}, 2), add({1: A}, [1, 2]), add({1: A}, hook="blocks.2.hook_resid_post")),
        *(add(v, per_layer=True) for v in ({1: A, 2: B}, A, torch.zeros(1, 2, 2, D))),
        *(add(ROWS, [0, 1], per_layer=True), add(torch.ones(2, 2, D))),
        add(np.zeros((1, 9000, 1)), per_layer=True, positions="0:9000"),
    ],
    "layers": [add(ROWS, [0, 1, 1], per_layer=True)],
    "per_layer": [add(ROWS, per_layer=1)],
    "keep_norm": [add(A, keep_norm=1)],
    "direction": [lambda: weir.Clamp(ROWS[None], 1, value=1.0, per_layer=True)],
    "W": [lambda: weir.LowRank({1: A}, {2: A}, [1.0])],
    "R": [lambda: weir.LowRank({1: A}, ROWS, [[1.0]], per_layer=True)],
}


@pytest.mark.parametrize(("field", "make"), pairs(WRONG))
def test_what_is_wrong_about_vectors_by_layer_is_refused_at_once(field, make):
    refused(make, f"intervention.{field}")


def test_what_may_be_meant_by_layer_is_asked_whether_it_is():
    for make, field, words in (
        (lambda: weir.Clamp(ROWS, 1, value=1.0), "direction", "got 3 rows"),
        (lambda: weir.Replace(torch.ones(2, 3, D)), "values", "expected 1 or 2 dimensions"),
        (lambda: weir.Clamp({1: torch.ones(2, 1, D)}, value=1.0), "direction.1", "expected 1 or 2 dimensions"),
        (lambda: weir.Ablate([[[1.0] * D]]), "directions", "expected 1 or 2 dimensions"),
    ):
        message = refused(make, f"intervention.{field}")
        assert words in message and "per_layer=True" in message


def test_what_is_wrong_about_vectors_by_layer_for_a_model():
    names = {"four": np.ones((4, D)), "deep": np.ones((1, 3, 2, D)), "narrow": np.ones(D - 1)}
    lookup = lambda ref, _field: names[ref].astype(np.float32)
    for item, field, words in (
        (weir.Add(ROWS[:2], per_layer=True), "vector", "2 vectors for 3 layers"),
        (weir.Add("four", per_layer=True), "vector", "4 vectors for 3 layers"),
        (weir.Add("deep", per_layer=True), "vector", "expected 2 or 3 dimensions"),
        (weir.Add("deep", 1), "vector", "per_layer=True"),
        (weir.Add({0: A, 3: B}), "vector", "block 3 does not exist"),
        (weir.Add({0: A, 1: "narrow"}), "vector.1", "width 7"),
        (weir.Add(ROWS[:, :-1], [2, 0, 1], per_layer=True), "vector[1]", "width 7"),
        (weir.Ablate({0: A, 1: torch.zeros(D)}), "directions.1", "length zero"),
        (weir.Clamp(torch.zeros(2, D), [2, 1], value=1.0, per_layer=True), "direction[1]", "length zero"),
        (weir.Replace({0: A, 1: B * 1e6}), "values.1", "changes a row by up to"),
        (weir.LowRank({0: ROWS}, {0: ROWS}, {0: [1.0, 2.0]}), "W.0", "do not fit"),
    ):
        half = EngineCapabilities(FACTS.sites, LAYERS, D, "float16", 1000)
        found = refused(lambda: admit({"weir": RequestSpec((), (item,))}, half, lookup=lookup), f"intervention.{field}")  # noqa: B023
        assert words in found
    some = EngineCapabilities(
        {s: "it is not tapped" if s.layer else "" for s in FACTS.sites}, LAYERS, D, "float32", 1000
    )
    message = refused(lambda: admit({"weir": RequestSpec((), (weir.Add({0: A, 1: B}),))}, some), "intervention.vector")
    assert "resid_post[1] is refused" in message


def test_a_model_s_one_embedding_has_one_vector():
    want = does(weir.Add(A, hook="embed"))
    assert does(weir.Add(A[None], hook="embed", per_layer=True)) == want == does(weir.Add({0: A}, hook="embed"))
    refused(lambda: does(weir.Add(ROWS, hook="final_norm", per_layer=True)), "intervention.vector")


def test_the_wire_says_only_what_is_asked():
    """An older server knows neither field."""
    plain = weir.Add(A, 1).to_json()
    assert not {"keep_norm", "per_layer"} & set(plain)
    item = weir.Add(ROWS[:2], [2, 0], per_layer=True, keep_norm=True)
    sent = item.to_json()
    assert sent["layers"] == [2, 0] and sent["per_layer"] is True and sent["keep_norm"] is True
    by_layer = weir.Ablate({2: "a", 0: {"ref": "b"}}).to_json()
    assert by_layer["layers"] == [0, 2] and by_layer["directions"] == {"0": {"ref": "b"}, "2": {"ref": "a"}}
    assert parse_intervention(by_layer, "x").to_json() == by_layer


def test_equal_wishes_by_layer_are_known_by_their_digests():
    """What a request asks is remembered, however large the vectors are."""
    size = MAX_KEY_BYTES // 4 // LAYERS
    draw = torch.Generator().manual_seed(1)
    vectors = {n: torch.randn(size // 2, generator=draw) for n in range(LAYERS)}
    site_requests = [
        {"weir": RequestSpec((), (weir.Add(dict(v)),)).to_json()}
        for v in (vectors, {n: v.clone() for n, v in vectors.items()}, vectors | {1: vectors[0]})
    ]
    one, same, other = (admission_key(site_request, True) for site_request in site_requests)
    assert one.key == same.key != other.key and one.cacheable
    content = next(part for part in one.key if isinstance(part, bytes))
    assert len(content) < 2000 < one.size


# --- keep_norm ---


def run(item, h, layer=1):
    bench = Bench()
    bench.join("r", [item], len(h))
    return bench.run(tap_of(Site("resid_post", layer)), bench.programs(["r"], [len(h)], [0]), h, None)


@pytest.mark.parametrize("norm_match", [False, True])
@pytest.mark.parametrize("scale", [0.3, -2.0, 1e9, -1e30, 3e38])
def test_a_turned_row_keeps_its_norm(scale, norm_match):
    h = (
        torch.randn(6, D, generator=torch.Generator().manual_seed(2))
        * torch.tensor([1e-3, 1, 10, 100, 1e4, 1e6])[:, None]
    )
    got = run(weir.Add(A, 1, scale, norm_match=norm_match, keep_norm=True), h).double()
    wide, v = h.double(), A.double()
    step = scale * (v / v.norm() * wide.norm(dim=1, keepdim=True) if norm_match else v)
    want = (wide + step) * wide.norm(dim=1, keepdim=True) / (wide + step).norm(dim=1, keepdim=True)
    assert ((got - want).norm(dim=1) <= 2e-6 * wide.norm(dim=1)).all()
    assert ((got.norm(dim=1) - wide.norm(dim=1)).abs() <= 1e-6 * wide.norm(dim=1)).all()


def test_a_row_that_would_vanish_stays_as_it_is():
    h = torch.stack([-2 * A, torch.zeros(D), B])
    got = run(weir.Add(A, 1, 2.0, keep_norm=True), h)
    assert torch.equal(got[:2], h[:2]) and not torch.equal(got[2], h[2])
    got = run(weir.Add(A, 1, 2.0, norm_match=True, keep_norm=True), h)
    assert torch.equal(got[1], h[1])


def test_what_keeps_its_norm_is_not_too_large_for_any_dtype():
    half = EngineCapabilities(FACTS.sites, LAYERS, D, "float16", 1000)
    site_request = lambda **more: {"weir": RequestSpec((), (weir.Add(1e5 * A, 1, 1e3, **more),))}
    refused(lambda: admit(site_request(), half), "intervention.scale")
    (move,) = admit(site_request(keep_norm=True), half).effective
    assert [i.kind for i in move.instructions] == [KEEP_NORM]


def test_a_vector_that_turns_shares_its_row_with_one_that_adds():
    found = admitted(weir.Add(A, 1), weir.Add(A, 1, 3.0, keep_norm=True))
    assert len(found.rows) == 1
    both = admitted(weir.Add(A, 1, norm_match=True), weir.Add(2 * A, 1, norm_match=True, keep_norm=True))
    assert len(both.rows) == 1
