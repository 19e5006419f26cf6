"""What callers write: vectors, interventions, vllm-lens's form, tiers, the shelf."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vllm_weir as weir
from tests.unit.frontends import frontend_of
from tests.unit.refusals import pairs, refused
from tests.unit.request_strategies import served
from vllm_weir.compat.vllm_lens.request import lens_capture, lens_interventions
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.schema.intervention_kinds import KINDS, parse_intervention
from vllm_weir.schema.vectors import Vector, digest_of

D = 8
FACTS = EngineCapabilities(served(3, [("resid_mid", n) for n in range(3)]), 3, D, "float32", 1000)

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.binary(max_size=12), st.just(10**400)
)
junk = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["b64", "dtype", "shape", "ref", "x"]), inner, max_size=4),
    ),
    max_leaves=12,
)
wire = st.fixed_dictionaries(
    {},
    optional={
        "b64": st.one_of(junk, st.binary(max_size=40).map(lambda b: base64.b64encode(b).decode())),
        "dtype": st.one_of(junk, st.sampled_from(["float32", "float16", "bfloat16", "float64", "int8"])),
        "shape": st.one_of(junk, st.lists(st.integers(-1, 10), max_size=3), st.just([2**40, 2**40])),
        "ref": junk,
    },
)


by_layer = st.dictionaries(
    st.one_of(st.integers(), st.integers().map(str), scalars.filter(lambda x: x != 10**400)),
    st.one_of(wire, junk, st.just([1.0, 2.0])),
    max_size=3,
)


fields = st.sampled_from(
    str.split("op vector layers scale hook positions direction value R path values directions per_layer keep_norm")
)
values = st.one_of(junk, by_layer, st.sampled_from(list(KINDS)), st.just([[1.0, 2.0]] * 3))
lens = st.fixed_dictionaries(
    {"activations": junk, "layer_indices": junk},
    optional={"scale": junk, "norm_match": junk, "position_indices": junk},
)


@pytest.mark.parametrize(
    ("given_", "parse", "field"),
    [
        (wire, lambda value: Vector.parse(value, "here.vector"), "here.vector"),
        (st.dictionaries(st.one_of(fields, st.integers()), values),
         lambda value: parse_intervention(value, "interventions[0]"), "interventions[0]"),
        (lens, lens_interventions, "apply_steering_vectors"),
    ],
    ids=["vector", "intervention", "vllm-lens's"],
)  # fmt: skip
@given(data=st.data())
def test_anything_is_accepted_or_refused_by_name(given_, parse, field, data):
    try:
        got = parse(data.draw(st.one_of(junk, given_)))
    except WeirError as e:
        assert e.field.startswith(field)
        return
    if isinstance(got, Vector):
        assert got.ref or (got.array.dtype == np.float32 and np.isfinite(got.array).all() and got.array.ndim in (1, 2))


def test_every_way_to_write_a_vector_is_the_same():
    row = torch.arange(D) / 4
    forms = [row, row.double(), row.numpy(), row.tolist(), tuple(row.tolist()), torch.nn.Parameter(row)]
    for dtype, kind in (("float32", "<f4"), ("float64", "<f8"), ("float16", "<f2")):
        data = base64.b64encode(row.numpy().astype(kind).tobytes()).decode()
        forms.append({"b64": data, "dtype": dtype, "shape": [D]})
    half = row.bfloat16().view(torch.uint16).numpy().tobytes()
    forms += [{"b64": base64.b64encode(half).decode(), "dtype": "bfloat16", "shape": [D]}, row.bfloat16()]
    assert len({Vector.parse(f, "v").digest for f in forms}) == 1
    assert all(np.array_equal(Vector.parse(f, "v").array, row.numpy()) for f in forms)


def test_a_list_of_rows_may_hold_tensors():
    rows = torch.randn(3, D)
    for kind in (rows.bfloat16(), rows.requires_grad_(), rows.half()):
        want = kind.detach().float().tolist()
        assert weir.Replace(list(kind), 0, positions=[3, 1, 2]).values.array.tolist() == want
        mixed = [kind[0], want[1], kind[2].detach().float().numpy()]
        assert weir.Add(mixed, 0, positions="0:3").vector.array.tolist() == want


GOOD = torch.ones(D)
ONE = {"b64": "AAAAAA==", "dtype": "float32", "shape": [1]}


def add(vector=GOOD, layers=1, **more):
    return lambda: weir.Add(vector, layers, **more)


def clamp(direction=GOOD, **more):
    return lambda: weir.Clamp(direction, 1, **more)


WRONG = {
    "vector": [
        *map(add, (torch.full((D,), float("nan")), [float("inf")] * D, [1e39] * D, torch.ones(2, 2, D), [], ["a"])),
        *map(add, ([[1.0], [1.0, 2.0]], np.zeros((10_001, 1)), torch.ones(4, dtype=torch.complex64))),
        *map(add, (torch.eye(D).to_sparse(), torch.ones(D, device="meta"), torch.ones(D, dtype=torch.bool))),
    ],
    "vector.b64": [add(ONE | {"b64": b64}) for b64 in ("!!", "AAA", "AAAA", bytes(4))] + [add({"dtype": "float32"})],
    "vector.dtype": [add(ONE | {"dtype": dtype}) for dtype in ("int8", ["x"])],
    "vector.shape": [add(ONE | {"shape": shape}) for shape in ([0], [2**40, 2**40])],
    "vector.nonsense": [add({"nonsense": 1})],
    "vector.ref": [add("")],
    "layers": [add(layers=-1), add(layers="some"), add(layers=2, hook="blocks.1.hook_resid_post")],
    "scale": [add(scale=scale) for scale in (float("nan"), "2", True)],
    "norm_match": [add(norm_match=1)],
    "hook": [add(hook="nowhere")],
    "positions": [add(positions="some"), add(torch.ones(2, D), positions={"token_ids": [1]})],
    "value": [clamp(), clamp(value=1.0, min=0.0)],
    "min": [clamp(min=1.0, max=0.0)],
    "direction": [clamp(torch.ones(2, D), value=1.0)],
    "alpha": [lambda: weir.Replace(GOOD, 1, alpha=float("inf"))],
    "b": [lambda: weir.LowRank(GOOD, GOOD, torch.ones(2, 1), 1)],
}


@pytest.mark.parametrize(("field", "make"), pairs(WRONG))
def test_refused_where_it_is_written(field, make):
    with refused(f"intervention.{field}"):
        make()


WRONG_FOR_THE_MODEL = {
    "vector": [weir.Add(torch.ones(D + 1), 1), weir.Add("unknown", 1)],
    "layers": [weir.Add(GOOD, 3), weir.Add(GOOD, 1, hook="embed")],
    "hook": [weir.Add(GOOD, 1, hook="resid_mid")],
    "directions": [weir.Ablate(torch.zeros(D), 1)],
    "direction": [weir.Clamp(torch.zeros(D), 1, value=1.0)],
    "W": [weir.LowRank(torch.ones(2, D), torch.ones(3, D), torch.ones(2), 1)],
}


@pytest.mark.parametrize(("field", "item"), pairs(WRONG_FOR_THE_MODEL))
def test_refused_on_admission(field, item):
    spec = {"v": 1, "interventions": [weir.Add(GOOD, 0).to_json(), item.to_json()]}
    with refused(f"interventions[1].{field}"):
        admit({"weir": spec}, FACTS)


def test_refusals_of_vectors_say_why():
    for value, field, why in (
        (torch.ones(4, dtype=torch.complex64), "v", "expected numbers, got complex64"),
        ({"dtype": "float32", "shape": [D]}, "v.b64", "missing"),
        (ONE | {"b64": bytes(4)}, "v.b64", "base64 text"),
    ):
        with refused(field, why):
            Vector.parse(value, "v")


def test_a_hook_that_names_its_block_may_repeat_it():
    for layers in (1, [1], np.array([1]), "all"):
        assert weir.Capture("blocks.1.hook_resid_post", layers).layers == (1,)
        assert weir.Add(GOOD, layers, hook="blocks.1.hook_resid_post").layers == (1,)
    for layers in (2, [1, 2], np.array([1, 2])):
        for ask in (weir.Capture, lambda hook, layers: weir.Add(GOOD, layers, hook=hook)):
            with pytest.raises(WeirError, match="says block 1 already"):
                ask("blocks.1.hook_resid_post", layers)


@pytest.mark.parametrize("layers", [None, {1}, {"a": 1}, {"token_ids": [1]}])
def test_what_are_no_layers_is_refused_in_words_about_layers(layers):
    for ask in (weir.Capture, lambda layers: weir.Add(GOOD, layers)):
        with pytest.raises(WeirError, match="layers is 'all', an int or a list of ints, got") as caught:
            ask(layers=layers)
        assert caught.value.field.endswith(".layers")


def test_a_vector_is_taken_as_it_was():
    mine = np.ones(D, np.float32)
    item = weir.Add(mine, 1)
    mine[:] = 5
    assert item.vector.array.tolist() == [1.0] * D
    with pytest.raises(ValueError):
        item.vector.array[0] = 3


def test_too_many_selectors_are_refused_by_name():
    from vllm_weir.frontend.admission.engine_wire import make_engine_request
    from vllm_weir.schema.engine_traits import TableSizes

    admitted = admit(
        {"weir": {"v": 1, "interventions": [weir.Add(GOOD, 1, positions=k).to_json() for k in range(64)]}}, FACTS
    )
    with refused("interventions"):
        make_engine_request(admitted, "reply", None, 100, 5, FACTS, 1, TableSizes(100, 1000, 1000))


def test_lens_forms_mean_the_same():
    rows = torch.randn(2, 3, D, generator=torch.Generator().manual_seed(1))
    more = {"layer_indices": [0, 2], "scale": 1.5, "norm_match": True, "position_indices": [4, 0, 2]}
    live = weir.SteeringVector(rows, **more)
    plain = live.to_json()
    data = base64.b64encode(rows.numpy().tobytes()).decode()
    theirs = plain | {"activations": {"data": data, "dtype": "torch.float32", "shape": [2, 3, D]}}
    dumped = json.dumps([live.model_dump(mode="json")])
    forms = [[live], live, dumped, [plain], plain, json.dumps([plain]), json.dumps(plain), [theirs]]
    read = [[i.to_json() for i in lens_interventions(f)] for f in (*forms, SimpleNamespace(activations=rows, **more))]
    assert all(r == read[0] for r in read)
    first, second = lens_interventions(live)
    assert first.layers == (0,) and second.layers == (2,) and first.hook == "resid_post"
    assert first.positions.to_json() == [0, 2, 4] and first.scale == 1.5 and first.norm_match
    assert np.array_equal(first.vector.array, rows[0][[1, 2, 0]].numpy())


def test_lens_vectors_have_what_scripts_call_of_pydantics():
    rows = torch.randn(2, 3, D, generator=torch.Generator().manual_seed(1)).bfloat16()
    live = weir.SteeringVector(rows, [0, 2], 1.5, True, [4, 0, 2])
    want = [one.to_json() for one in lens_interventions(live)]
    theirs = live.to_json() | {"activations": weir.serialize_tensor(rows)}
    text = live.model_dump_json(indent=2)
    read = [weir.SteeringVector.model_validate(data) for data in (live, live.model_dump(), theirs, vars(live))]
    for one in (*read, weir.SteeringVector.model_validate_json(text), live.model_copy(), live.model_copy(deep=True)):
        assert isinstance(one.activations, torch.Tensor) and one.activations.shape == rows.shape
        assert [i.to_json() for i in lens_interventions(one)] == want
    other = live.model_copy(update={"scale": 2.0})
    assert (other.scale, live.scale) == (2.0, 1.5) and other.activations is live.activations
    assert live.model_copy(deep=True).activations is not live.activations
    with refused("apply_steering_vectors[0].layer_indices"):
        weir.SteeringVector.model_validate(live.model_dump() | {"layer_indices": [0]})


def test_lens_positions_of_broadcast_vectors_are_not_lost():
    rows = torch.randn(2, D, generator=torch.Generator().manual_seed(1))
    everywhere = lens_interventions(weir.SteeringVector(rows, [0, 2]))
    there = lens_interventions(weir.SteeringVector(rows, [0, 2], position_indices=[7, 3]))
    assert [i.positions.to_json() for i in (*everywhere, *there)] == ["all", "all", [3, 7], [3, 7]]
    assert [i.vector.array.tolist() for i in there] == rows.tolist()


def test_lens_lists_and_numbers_may_be_arrays_and_numpys():
    """Blocks picked with numpy, for the capture key and in the JSON of a steering vector."""
    for blocks in (np.array([2, 0]), np.array([2]), torch.tensor([2, 0]), [np.int64(2)], np.int64(2)):
        assert lens_capture(blocks).layers == tuple(sorted(np.atleast_1d(np.asarray(blocks)).tolist()))
    assert lens_capture(np.array([], int)) is lens_capture(torch.tensor([])) is None
    rows = torch.ones(2, 2, D)
    plain = weir.SteeringVector(rows, [2, 0], 0.5, position_indices=[3, 7])
    want = [i.to_json() for i in lens_interventions(plain)]
    for kind in (np.array, torch.tensor, lambda numbers: [np.int64(n) for n in numbers]):
        odd = weir.SteeringVector(rows, kind([2, 0]), np.float32(0.5), position_indices=kind([3, 7]))
        assert json.dumps(odd.model_dump(mode="json")) == json.dumps(plain.to_json())
        assert [i.to_json() for i in lens_interventions(odd)] == want
    for field, value in (("layer_indices", None), ("scale", "2"), ("position_indices", 1.5)):
        with refused(field):
            replace(plain, **{field: value}).to_json()


LENS = {"activations": torch.ones(2, 3, D), "layer_indices": [0, 1]}
WRONG_LENS = {
    "layer_indices": [LENS | {"layer_indices": [0]}, {"activations": torch.ones(1, 3, D), "layer_indices": 0}],
    "activations": [LENS | {"activations": torch.ones(D), "layer_indices": [0]}, {"layer_indices": [0, 1]}],
    "position_indices": [
        *(LENS | {"position_indices": at} for at in ([1, 1, 2], [-1, 1, 2], [0, 1, 2, 3], [0, 1], "all")),
        LENS | {"activations": torch.ones(2, D), "position_indices": [-1]},
    ],
    "more": [LENS | {"more": 1}],
}


@pytest.mark.parametrize(("field", "value"), pairs(WRONG_LENS))
def test_lens_refuses_by_name(field, value):
    with refused(f"apply_steering_vectors[0].{field}"):
        lens_interventions([value])


def test_tiers_become_positions():
    a, b, c, m = ([float(k)] * D for k in range(1, 5))
    made = weir.from_tiers(
        {"post_mlp": {1: a}},
        {"pre_attn": {"2": {"vector": b, "scale": 0.5}}},
        {"resid_post": {0: c}},
        ("mod", 2.0),
        {"mod": {"vectors": {"post_mlp": {1: {"vector": m, "scale": 3.0}}}, "decode_vectors": {"post_mlp": {0: m}}}},
    )
    got = [(i.hook, i.layers, i.positions.to_json(), i.scale, float(i.vector.array[0])) for i in made]
    assert got == [
        ("resid_post", (1,), "all", 6.0, 4.0),
        ("resid_post", (0,), "generated", 2.0, 4.0),
        ("resid_post", (1,), "all", 1.0, 1.0),
        ("resid_pre", (2,), "prompt", 0.5, 2.0),
        ("resid_post", (0,), "generated", 1.0, 3.0),
    ]
    assert weir.from_tiers() == []
    (one,) = weir.from_tiers(steering_module_ref="mod", modules={"mod": {"prefill_vectors": {"post_mlp": {0: m}}}})
    assert one.positions.to_json() == "prompt"


@pytest.mark.parametrize("one", [torch.tensor(1), np.int64(1)])
def test_tiers_take_ints_and_numbers_without_dimensions(one):
    (add,) = weir.from_tiers(steering_vectors={"post_mlp": {one: {"vector": [1.0] * D, "scale": torch.tensor(2.0)}}})
    assert add.layers == (1,) and add.scale == 2.0
    vector = weir.SteeringVector(torch.ones(1, D), [one], torch.tensor(0.5), position_indices=[one])
    assert vector.to_json() == weir.SteeringVector(torch.ones(1, D), [1], 0.5, position_indices=[1]).to_json()
    (add,) = lens_interventions([vector])
    assert add.layers == (1,) and add.positions.to_json() == [1] and add.scale == 0.5


def test_a_hook_of_the_forks_without_layers_asks_for_nothing():
    vectors = {"post_mlp": {}, "pre_attn": {0: [1.0] * D}}
    (add,) = weir.from_tiers(vectors, decode_steering_clamps={"post_mlp": {}})
    assert add.hook == "resid_pre"


ROW = [1.0] * D
POST = {"post_mlp": {1: ROW}}
WRONG_TIERS = {
    "steering_vectors.nowhere.1.hook": [{"steering_vectors": {"nowhere": {1: ROW}}}],
    "steering_vectors.nowhere": [{"steering_vectors": {"nowhere": {}}}],
    "steering_clamps.post_mlp.1": [{"steering_clamps": {"post_mlp": {1: []}}}],
    "prefill_steering_vectors.post_mlp": [{"prefill_steering_vectors": {"post_mlp": ROW}}],
    "decode_steering_vectors.post_mlp.x": [{"decode_steering_vectors": {"post_mlp": {"x": ROW}}}],
    "steering_vectors.post_mlp.1.scale": [
        {"steering_vectors": {"post_mlp": {1: {"vector": ROW, "scale": float("nan")}}}}
    ],
    "steering_vectors.post_mlp.1.vector": [{"steering_vectors": {"post_mlp": {1: [float("nan")] * D}}}],
    "steering_module_ref": [
        {"steering_module_ref": ref, "modules": modules}
        for ref, modules in (("gone", None), (("gone", 1.0), {}), (("m",), {"m": {}}), (5, {"m": {}}))
    ],
    "steering_module_ref[1]": [{"steering_module_ref": ("m", "x"), "modules": {"m": {}}}],
    "modules.m": [{"steering_module_ref": "m", "modules": {"m": [ROW]}}],
    "modules.m.vector": [{"steering_module_ref": "m", "modules": {"m": {"vector": POST}}}],
    "modules.m.interventions": [{"steering_module_ref": "m", "modules": {"m": {"interventions": []}}}],
}


@pytest.mark.parametrize(("field", "tiers"), pairs(WRONG_TIERS))
def test_tiers_refuse_by_name(field, tiers):
    with refused(field):
        weir.from_tiers(**tiers)


def test_the_shelf_keeps_content():
    names = frontend_of(None).names
    digest = names.put_vector("a", GOOD)
    assert digest == digest_of(GOOD.numpy()) and names.vectors.names() == {"a": {"digest": digest, "shape": [D]}}
    assert np.array_equal(names.vectors.find("a", "x"), GOOD.numpy()) and np.array_equal(
        names.vectors.find(digest, "x"), GOOD.numpy()
    )
    assert names.put_vector("b", "a") == digest
    assert names.put_vector("a", 2 * GOOD) != digest and names.vectors.find("b", "x")[0] == 1.0
    names.remove_vector("a")
    for call, field in (
        (lambda: names.remove_vector("a"), "name"),
        (lambda: names.vectors.find("a", "x"), "x"),
        (lambda: names.put_vector("", GOOD), "name"),
        (lambda: names.put_vector("n", [float("nan")]), "vector"),
    ):
        with refused(field):
            call()


@pytest.mark.parametrize(
    ("make", "given", "right"),
    [
        (weir.Add, {"layer": 3}, "layers"),
        (weir.Add, {"layers": 3, "coeff": 2.0}, "scale"),
        (weir.Add, {"layers": 3, "strength": 2.0}, "scale"),
        (weir.Ablate, {"layer": 3}, "layers"),
        (weir.Clamp, {"layers": 3, "max": 0.0, "position": 1}, "positions"),
        (weir.Capture, {"layer": 3}, "layers"),
        (weir.Capture, {"head": 3}, "heads"),
    ],
)
def test_another_packages_word_is_answered_with_the_right_one(make, given, right):
    vector = () if make is weir.Capture else ([1.0, 0.0],)
    with pytest.raises(weir.WeirError, match=rf"{make.__name__} calls it {right}$") as e:
        make(*vector, **given)
    assert e.value.field == [*given][-1]
    with pytest.raises(TypeError, match="nothing"):
        make(*vector, nothing=1)


def test_the_public_names_are_what_completion_shows():
    import inspect

    shown = {name for name in dir(weir) if not name.startswith("_")}
    assert shown == set(weir.__all__) - {"__version__"}
    assert "layers" in inspect.signature(weir.Add).parameters
