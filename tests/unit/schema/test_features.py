"""`Features`, `SetFeature`, `Reconstruct` and `Lens`: parsed or refused by name, and their wire forms."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vllm_weir as weir
from tests.unit.refusals import pairs, refused
from vllm_weir.errors import WeirError

ASKED = {"features": weir.Features, "intervention": weir.SetFeature, "lens": weir.Lens}

VALID = [
    (weir.Features("a"), {"name": "a", "top_k": 32}),
    (weir.Features("a", 5), {"name": "a", "top_k": 5}),
    (weir.Features("a", top_k=np.int64(7), positions=[0, -1]), {"name": "a", "top_k": 7, "positions": [0, -1]}),
    (weir.Features("a", ids=[9, 3]), {"name": "a", "ids": [9, 3]}),
    (weir.Features("a", ids=torch.tensor([9, 3])), {"name": "a", "ids": [9, 3]}),
    (weir.Features("a", ids=4, positions="generated"), {"name": "a", "ids": [4], "positions": "generated"}),
    (weir.SetFeature("a", 3, value=2), {"op": "set_feature", "name": "a", "feature": 3, "value": 2.0}),
    (weir.SetFeature("a", 3, value=0), {"op": "set_feature", "name": "a", "feature": 3, "value": 0.0}),
    (
        weir.SetFeature("a", 3, scale=0.5, positions="prompt"),
        {"op": "set_feature", "name": "a", "feature": 3, "scale": 0.5, "positions": "prompt"},
    ),
    (
        weir.SetFeature("a", 3, value=2, read_back=True),
        {"op": "set_feature", "name": "a", "feature": 3, "value": 2.0, "read_back": True},
    ),
    (weir.SetFeature("a", 3, add=-1.5), {"op": "set_feature", "name": "a", "feature": 3, "add": -1.5}),
    (weir.Reconstruct("a"), {"op": "reconstruct", "name": "a"}),
    (
        weir.Reconstruct("a", error=True, positions=[3], when=weir.When("p", above=1.0)),
        {"op": "reconstruct", "name": "a", "error": True, "positions": [3], "when": {"probe": "p", "above": 1.0}},
    ),
    (weir.Lens(), {"kind": "logit", "layers": "all", "top_k": 10}),
    (weir.Lens("logit", 3, 4), {"kind": "logit", "layers": [3], "top_k": 4}),
    (
        weir.Lens("tuned", layers=[5, 2], path=Path("lens"), positions="last_prompt"),
        {"kind": "tuned", "layers": [2, 5], "top_k": 10, "path": "lens", "positions": "last_prompt"},
    ),
    (
        weir.Lens("jacobian", path="j.pt", tokens=torch.tensor([9, 3])),
        {"kind": "jacobian", "layers": "all", "path": "j.pt", "tokens": [9, 3]},
    ),
    (weir.Lens(name="j"), {"name": "j", "layers": "all", "top_k": 10}),
    (weir.Lens(hook="mlp_out"), {"kind": "logit", "layers": "all", "top_k": 10, "hook": "mlp_out"}),
]


@pytest.mark.parametrize(("asked", "wire"), VALID)
def test_wire_forms(asked, wire):
    assert asked.to_json() == wire
    again = type(asked).from_json(json.loads(json.dumps(wire)))
    assert again == asked and again.to_json() == wire and hash(again) == hash(asked)
    assert type(asked).from_json(asked) is asked
    assert replace(asked) == asked
    with pytest.raises(FrozenInstanceError):
        asked.positions = "all"


def features(**more):
    return weir.Features, {"name": "a"} | more


def feature(**more):
    return weir.SetFeature, {"name": "a", "feature": 1} | more


def lens(**more):
    return weir.Lens, more


WRONG = {
    "x.name": [
        lens(name=""),
        lens(name=3),
        lens(kind="logit", name="j"),
        (weir.Features, {}),
        (weir.SetFeature, {"feature": 1, "value": 1}),
        (weir.Reconstruct, {}),
        *(features(name=name) for name in ("", "a" * 300, 3)),
    ],
    "x.top_k": [
        *(features(top_k=k) for k in (0, 1025, True)),
        features(top_k=3, ids=[1]),
        lens(top_k=0),
        lens(top_k=2, tokens=[1]),
    ],
    "x.ids": [features(ids=ids) for ids in ([], "123", [1, 1], [1, -1], [1, 2.5], list(range(5000)), {"1": 2})],
    "x.positions": [features(positions="never")],
    "x.k": [features(k=3)],
    "x.path": [
        features(path="y"),
        lens(path="a"),
        lens(name="j", path="a"),
        lens(kind="jacobian"),
        *(lens(kind="tuned", **path) for path in ({}, {"path": ""})),
    ],
    "x.feature": [(weir.SetFeature, {"name": "a", "value": 1}), *(feature(feature=k, value=1) for k in (-1, "1"))],
    "x.value": [feature(), feature(value=1, add=1), feature(value="1")],
    "x.scale": [feature(scale=float("nan"))],
    "x.add": [feature(add=1e39)],
    "x.read_back": [
        *(feature(read_back=True, **target) for target in ({"add": 1}, {"scale": 2}, {"value": -1})),
        feature(value=1, read_back=1),
    ],
    "x.error": [(weir.Reconstruct, {"name": "a", "error": 1})],
    "x.op": [feature(add=1, op="add"), (weir.Reconstruct, {"name": "a", "op": "set_feature"})],
    "x.tokens": [*(lens(tokens=tokens) for tokens in ([], [1, 1], [-1], "a", list(range(5000))))],
    "x.hook": [lens(hook="z"), lens(hook="nowhere"), lens(name="j", hook="mlp_out"), lens(hook=3)],
    "x.layers": [feature(add=1, layers=3), lens(layers=[]), lens(layers=-1)],
    "x.kind": [lens(kind="telescope"), lens(kind=["logit"])],
    "x.at": [lens(at="y")],
    "x": [(weir.Lens, []), (weir.SetFeature, None)],
}


@pytest.mark.parametrize(("field", "asked"), pairs(WRONG))
def test_wrong_fields_are_named(field, asked):
    kind, wire = asked
    with refused(field):
        kind.from_json(wire, "x")


@pytest.mark.parametrize("name", ASKED)
def test_fields_have_the_path_of_the_call(name):
    with refused(f"{name}.nonsense"):
        ASKED[name].from_json({"nonsense": 1})


def test_targets():
    assert weir.SetFeature("a", 1, value=0).target(5.0) == 0
    assert weir.SetFeature("a", 1, scale=2).target(5.0) == 10
    assert weir.SetFeature("a", 1, add=-2).target(5.0) == 3


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just(10**400))
junk = st.one_of(scalars, st.lists(scalars, max_size=3), st.dictionaries(st.text(max_size=3), scalars, max_size=2))


@given(
    st.sampled_from(sorted(ASKED)),
    st.dictionaries(
        st.sampled_from(str.split("name top_k ids positions feature value scale add kind layers path")),
        st.one_of(junk, st.just("a"), st.integers(1, 9)),
        max_size=5,
    ),
)
def test_anything_is_accepted_or_refused_by_name(where, wire):
    kind = ASKED[where]
    try:
        asked = kind.from_json(wire)
    except WeirError as e:
        assert e.field.startswith(where)
    else:
        assert kind.from_json(json.loads(json.dumps(asked.to_json()))) == asked
