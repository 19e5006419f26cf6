"""Which vector acts where: one for all positions, rows by position, and vectors by layer."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import vllm_weir as weir
from tests.unit.frontends import frontend_of
from tests.unit.schema.test_lowering import FACTS, LAYERS, Bench, D, admitted
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.admission.cache import MAX_KEY_BYTES, admission_key
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.vector_registry import VectorRegistry
from vllm_weir.frontend.outputs.view import OutputView
from vllm_weir.frontend.receive.tokens import PromptTokens, SequenceTokens
from vllm_weir.results.activations import Activations
from vllm_weir.results.receipt import InterventionReceipt
from vllm_weir.schema.compat.vllm_lens import lens_interventions
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
    with pytest.raises(WeirError) as caught:
        call()
    assert caught.value.field == field, caught.value
    return caught.value.message


# --- one vector ---


MAKE = {
    "add": lambda v, **more: weir.Add(v, 1, 2.0, **more),
    "add normed": lambda v, **more: weir.Add(v, 1, 2.0, norm_match=True, **more),
    "add, norm kept": lambda v, **more: weir.Add(v, 1, 2.0, keep_norm=True, **more),
    "replace": lambda v, **more: weir.Replace(v, 1, **more),
    "clamp": lambda v, **more: weir.Clamp(v, 1, min=0.5, **more),
    "ablate": lambda v, **more: weir.Ablate(v, 1, **more),
    "low rank": lambda v, **more: weir.LowRank(v, v * 0.5 if isinstance(v, torch.Tensor) else "half", "b", 1, **more),
}


@pytest.mark.parametrize("positions", ["all", "generated", [2, 5], "1:4", {"token_ids": [3]}])
@pytest.mark.parametrize("kind", MAKE)
def test_a_matrix_of_one_row_is_that_row(kind, positions):
    names = {"a": A.numpy(), "row": A[None].numpy(), "half": A.numpy() / 2, "b": np.ones(1, np.float32)}
    make = lambda v: MAKE[kind](v, positions=positions)
    lookup = lambda ref, _field: names[ref]
    want = does(make(A), lookup=lookup)
    assert len(want) == 1 and not want[0].per_position
    for form in (A[None], A, "a", "row"):
        assert does(make(form), lookup=lookup) == want, form
    (again,) = RequestSpec.parse(json.dumps(RequestSpec((), (make(A[None]),)).to_json())).interventions
    assert does(again, lookup=lookup) == want


def test_low_rank_takes_its_offsets_as_a_row_of_them():
    right, left, b = ROWS[:2], ROWS[1:], torch.tensor([0.5, -1.0])
    assert does(weir.LowRank(right, left, b[None], 1)) == does(weir.LowRank(right, left, b, 1))
    message = refused(lambda: weir.LowRank(right, left, b[:, None], 1), "intervention.b")
    assert "expected one vector, got 2 rows" in message


def test_a_clamp_has_one_direction():
    message = refused(lambda: weir.Clamp(ROWS, 1, value=1.0), "intervention.direction")
    assert "got 3 rows" in message and "per_layer=True" in message
    lookup = lambda ref, _field: ROWS.numpy()
    by_name = weir.Clamp("three", 1, value=1.0)
    assert "got 3 rows" in refused(lambda: does(by_name, lookup=lookup), "intervention.direction")


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


def test_lens_matrices_of_one_row_are_for_all_positions():
    """[layers, 1, d] as [layers, d], with positions and without."""
    stack = torch.stack([A, B])
    for more in ({}, {"position_indices": [7, 2, 4]}, {"position_indices": [3], "norm_match": True}):
        flat, deep = (lens_interventions(weir.SteeringVector(v, [2, 0], **more)) for v in (stack, stack[:, None]))
        assert does(*flat) == does(*deep) and not any(m.per_position for m in does(*deep))
        assert [i.positions.to_json() for i in deep] == [sorted(more.get("position_indices", [])) or "all"] * 2


def test_one_direction_to_project_on_may_be_a_matrix():
    def postprocess(directions):
        capture = weir.Capture(layers=1, project=directions)
        found = admit({"weir": RequestSpec((capture,))}, FACTS, lookup=lambda ref, _field: names[ref])
        return found.spec.postprocess, sorted(found.rows)

    names = {"row": A[None].numpy(), "stack": ROWS[None].numpy()}
    assert postprocess(A) == postprocess(A[None]) == postprocess("row")
    assert "[1, 3, 8]" in refused(lambda: postprocess("stack"), "capture.project")


# --- rows by position ---


@pytest.mark.parametrize("kind", ["add", "add normed", "add, norm kept", "replace"])
@pytest.mark.parametrize("positions", ["all", "generated", "sampled", "2:", "::2", "-3:", {"token_ids": [1]}])
def test_open_selectors_are_refused_at_once(kind, positions):
    message = refused(lambda: MAKE[kind](ROWS, positions=positions), "intervention.positions")
    assert "3 rows" in message and "is open" in message and "list 3 positions" in message
    assert "per_layer=True or {layer: vector}" in message
    by_name = MAKE[kind]("rows", positions=positions)
    later = refused(lambda: does(by_name, lookup=lambda ref, _field: ROWS.numpy()), "intervention.positions")
    assert later == message


@pytest.mark.parametrize(
    "positions", [[1], [4, 2], [5, 5, 2], [0, -1], "1:3", "0:10:2", ":4", "-3:-1", "last_prompt", 7]
)
def test_counts_that_differ_are_refused_at_once_where_they_are_known(positions):
    message = refused(lambda: weir.Add(ROWS, 1, positions=positions), "intervention.positions")
    assert message.startswith("3 rows for ") and "with a prompt" not in message
    assert "per_layer=True" in message
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
    frontend = frontend_of(FACTS)
    site_request = {"weir": {"v": 1, "interventions": [weir.Replace(ROWS, 1, positions="prompt").to_json()]}}
    zero = {"weir": {"v": 1, "interventions": [weir.Add(0 * ROWS, 1, positions="prompt").to_json()]}}
    for asked in (site_request, zero):
        frontend.admit("fits", asked, [1, 2, 3], 3, 4)
        for length in (1, 2, 4):
            message = refused(lambda: frontend.admit("r", asked, [1] * length, length, 4), "interventions[0].positions")  # noqa: B023
            assert message.startswith(f"3 rows for {length} positions with a prompt of {length} tokens")
    frontend.close()


def test_the_k_th_row_is_for_the_k_th_position_in_ascending_order():
    bench = Bench()
    bench.join("r", [weir.Replace(ROWS, 1, positions=[6, -1, 2])], 5)
    h = torch.zeros(8, D)
    got = bench.run(tap_of(Site("resid_post", 1)), bench.programs(["r"], [8], [0]), h, None)
    want = h.clone()
    want[2], want[4], want[6] = A, B, C
    assert torch.equal(got, want)


# --- vectors by layer ---


EVERY = {
    "add": lambda v, **m: weir.Add(v, scale=2.0, **m),
    "add normed": lambda v, **m: weir.Add(v, scale=2.0, norm_match=True, **m),
    "add, norm kept": lambda v, **m: weir.Add(v, scale=2.0, keep_norm=True, **m),
    "replace": lambda v, **m: weir.Replace(v, alpha=0.5, **m),
    "clamp": lambda v, **m: weir.Clamp(v, value=1.0, **m),
    "ablate": lambda v, **m: weir.Ablate(v, **m),
}


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("hook", ["resid_post", "resid_pre"])
def test_vectors_by_layer_do_what_single_ones_do(kind, hook):
    make = EVERY[kind]
    want = does(*(make(v, layers=n, hook=hook) for n, v in ((0, A), (1, B), (2, C))))
    stack = ROWS.numpy()
    registry = VectorRegistry()
    registry.put("stack", stack)
    registry.put("deep", stack[:, None])
    registry.put("a", A)
    registry.put("b", B[None])
    forms = [
        make({0: A, 1: B, 2: C}, hook=hook),
        make({2: C[None], "0": A.tolist(), np.int64(1): B.numpy()}, hook=hook),
        make({0: "a", 1: {"ref": "b"}, 2: C}, hook=hook),
        make({0: A, 1: B, 2: C}, layers=[2, 1, 0], hook=hook),
        make(ROWS, per_layer=True, hook=hook),
        make(ROWS[:, None], per_layer=True, hook=hook),
        make(ROWS[[2, 0, 1]], layers=[2, 0, 1], per_layer=True, hook=hook),
        make("stack", per_layer=True, hook=hook),
        make("deep", layers=range(3), per_layer=True, hook=hook),
    ]
    for form in forms:
        assert does(form, lookup=registry.find) == want, form
        sent = RequestSpec.parse(json.dumps(RequestSpec((), (form,)).to_json())).interventions
        assert does(*sent, lookup=registry.find) == want, form
        assert does(form.with_arrays(registry.find)) == want


def test_low_rank_by_layer():
    right, left, b = (torch.randn(2, 3, D if k < 2 else 1, generator=DRAW) for k in range(3))
    b = b[..., 0]
    want = does(*(weir.LowRank(right[k], left[k], b[k], layer) for k, layer in ((1, 0), (0, 2))))
    assert does(weir.LowRank(right, left, b, [2, 0], per_layer=True)) == want
    assert does(weir.LowRank(right, left, b[:, None], [2, 0], per_layer=True)) == want
    by = lambda rows: {2: rows[0], 0: rows[1]}
    assert does(weir.LowRank(by(right), by(left), by(b))) == want
    shared = does(*(weir.LowRank(right[0], left[0], b[k], layer) for k, layer in ((1, 0), (0, 2))))
    assert does(weir.LowRank(right[0], left[0], by(b))) == shared
    assert "do not fit" in refused(
        lambda: does(weir.LowRank(by(right), by(left), {2: b[0], 0: b[1, :2]})), "intervention.W.0"
    )


def test_directions_by_layer_are_projected_out_together():
    each = {0: ROWS[:2], 2: ROWS[1:]}
    want = does(weir.Ablate(ROWS[:2], 0), weir.Ablate(ROWS[1:], 2))
    assert does(weir.Ablate(each)) == want
    assert does(weir.Ablate(torch.stack([ROWS[1:], ROWS[:2]]), [2, 0], per_layer=True)) == want


def test_layers_that_do_the_same_are_one_move():
    (move,) = does(weir.Add({2: A, 0: A[None]}))
    assert move == does(weir.Add(A, [0, 2]))[0]
    first, second = does(weir.Add({0: A, 1: B, 2: A}))
    assert (first.layers, second.layers) == ((0, 2), (1,))


def test_rows_by_position_may_differ_by_layer():
    each = {0: ROWS[:2], 1: torch.stack([C, torch.zeros(D)]), 2: B}
    item = weir.Replace(each, positions=[4, 1])
    want = does(
        weir.Replace(ROWS[:2], 0, positions=[4, 1]),
        weir.Replace(each[1], 1, positions=[4, 1]),
        weir.Replace(B, 2, positions=[4, 1]),
    )
    assert does(item) == want and [m.per_position for m in want] == [True, True, False]
    assert refused(lambda: weir.Replace(each, positions=[4]), "intervention.positions").startswith("2 rows for 1 pos")
    assert "is open" in refused(lambda: weir.Replace(each), "intervention.positions")
    stack = torch.stack([ROWS] * LAYERS)
    assert refused(lambda: weir.Add(stack, per_layer=True, positions=[4]), "intervention.positions").startswith(
        "3 rows"
    )
    found = admitted(weir.Add(stack, per_layer=True, positions="prompt"))
    assert len(found.by_position) == 1
    Bench().enter("r", found, 3)
    refused(lambda: Bench().enter("r", found, 4), "intervention.positions")


WRONG = [
    (lambda: weir.Add({}), "vector"),
    (lambda: weir.Add({1: A, "1": B}), "vector.1"),
    (lambda: weir.Add({-1: A}), "vector.-1"),
    (lambda: weir.Add({"-2": A}), "vector.-2"),
    (lambda: weir.Add({10**12: A}), "vector.1000000000000"),
    (lambda: weir.Add({10**5000: A}), "vector.a int too large to show"),
    (lambda: weir.Add({1: A, "x": B}), "vector.x"),
    (lambda: weir.Add({1: A, None: C}), "vector.None"),
    (lambda: weir.Add({1: A, 2: [float("nan")] * D}), "vector.2"),
    (lambda: weir.Add({1: A, 2: {3: B}}), "vector.2.3"),
    (lambda: weir.Add({1: A}, 2), "vector"),
    (lambda: weir.Add({1: A}, [1, 2]), "vector"),
    (lambda: weir.Add({1: A}, hook="blocks.2.hook_resid_post"), "vector"),
    (lambda: weir.Add({1: A, 2: B}, per_layer=True), "vector"),
    (lambda: weir.Add(A, per_layer=True), "vector"),
    (lambda: weir.Add(ROWS, [0, 1], per_layer=True), "vector"),
    (lambda: weir.Add(ROWS, [0, 1, 1], per_layer=True), "layers"),
    (lambda: weir.Add(ROWS, per_layer=1), "per_layer"),
    (lambda: weir.Add(A, keep_norm=1), "keep_norm"),
    (lambda: weir.Add(torch.zeros(1, 2, 2, D), per_layer=True), "vector"),
    (lambda: weir.Add(torch.ones(2, 2, D)), "vector"),
    (lambda: weir.Add(np.zeros((1, 9000, 1)), per_layer=True, positions="0:9000"), "vector"),
    (lambda: weir.Clamp(ROWS[None], 1, value=1.0, per_layer=True), "direction"),
    (lambda: weir.LowRank({1: A}, {2: A}, [1.0]), "W"),
    (lambda: weir.LowRank({1: A}, ROWS, [[1.0]], per_layer=True), "R"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_is_wrong_about_vectors_by_layer_is_refused_at_once(number):
    make, field = WRONG[number]
    refused(make, f"intervention.{field}")


def test_a_stack_of_matrices_is_asked_whether_it_is_one_by_layer():
    for make, field in (
        (lambda: weir.Replace(torch.ones(2, 3, D)), "values"),
        (lambda: weir.Clamp({1: torch.ones(2, 1, D)}, value=1.0), "direction.1"),
        (lambda: weir.Ablate([[[1.0] * D]]), "directions"),
    ):
        message = refused(make, f"intervention.{field}")
        assert "expected 1 or 2 dimensions" in message and "per_layer=True or {layer: vector}" in message


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


def test_a_receipt_has_one_entry_for_each_intervention():
    """Whatever it is carried out as; of what came from the cache, each position counts once."""
    rows = {0: torch.stack([A, torch.zeros(D), C]), 2: torch.stack([torch.zeros(D), B, C])}
    items = [
        weir.Add({0: A, 1: B, 2: torch.zeros(D)}),
        weir.Add(torch.zeros(LAYERS, D), per_layer=True),
        weir.Add(rows, positions=[0, 1, 6]),
        weir.Ablate(C, "all", positions="generated"),
    ]
    found = admitted(*items)
    assert found.parted == (2, 1, 2, 1) and len(found.effective) == 5
    pending = SimpleNamespace(
        admitted=found, await_steered=lambda *_: None, check=lambda: None, memory=None, early=None, whole=lambda _: None
    )
    view = OutputView(
        pending, found.parts[0], SequenceTokens(PromptTokens([1] * 5), [1] * 4), 0, True, False, 2, None, D, 1.0
    )
    view._cached_activations = Activations({}, {}, {})
    receipt = view.receipt()
    site = lambda layer: Site("resid_post", layer)
    assert receipt.steered == (
        {site(0): 6, site(1): 6},
        {},
        {site(0): 1, site(2): 1},
        {site(0): 3, site(1): 3, site(2): 3},
    )
    assert receipt.shared == (2, 0, 2, 0)
    assert receipt.interventions == (
        InterventionReceipt("add", "resid_post", (0, 1), 6),
        InterventionReceipt("add", "resid_post", (), 0),
        InterventionReceipt("add", "resid_post", (0, 2), 1),
        InterventionReceipt("ablate", "resid_post", (0, 1, 2), 3),
    )


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
