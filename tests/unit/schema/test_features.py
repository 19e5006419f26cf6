"""`Features`, `SetFeature` and `Lens`: parsed or refused by name, and their wire forms."""

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
    (weir.SetFeature("a", 3, add=-1.5), {"op": "set_feature", "name": "a", "feature": 3, "add": -1.5}),
    (weir.Lens(), {"kind": "logit", "layers": "all", "top_k": 10}),
    (weir.Lens("logit", 3, 4), {"kind": "logit", "layers": [3], "top_k": 4}),
    (
        weir.Lens("tuned", layers=[5, 2], path=Path("lens"), positions="last_prompt"),
        {"kind": "tuned", "layers": [2, 5], "top_k": 10, "path": "lens", "positions": "last_prompt"},
    ),
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


@pytest.mark.parametrize(
    ("kind", "wire", "field"),
    [
        (weir.Features, {}, "x.name"),
        (weir.Features, {"name": ""}, "x.name"),
        (weir.Features, {"name": "a" * 300}, "x.name"),
        (weir.Features, {"name": 3}, "x.name"),
        (weir.Features, {"name": "a", "top_k": 0}, "x.top_k"),
        (weir.Features, {"name": "a", "top_k": 1025}, "x.top_k"),
        (weir.Features, {"name": "a", "top_k": True}, "x.top_k"),
        (weir.Features, {"name": "a", "top_k": 3, "ids": [1]}, "x.top_k"),
        (weir.Features, {"name": "a", "ids": []}, "x.ids"),
        (weir.Features, {"name": "a", "ids": "123"}, "x.ids"),
        (weir.Features, {"name": "a", "ids": [1, 1]}, "x.ids"),
        (weir.Features, {"name": "a", "ids": [1, -1]}, "x.ids"),
        (weir.Features, {"name": "a", "ids": [1, 2.5]}, "x.ids"),
        (weir.Features, {"name": "a", "ids": list(range(5000))}, "x.ids"),
        (weir.Features, {"name": "a", "ids": {"1": 2}}, "x.ids"),
        (weir.Features, {"name": "a", "positions": "never"}, "x.positions"),
        (weir.Features, {"name": "a", "k": 3}, "x.k"),
        (weir.Features, {"name": "a", "path": "y"}, "x.path"),
        (weir.SetFeature, {"name": "a", "value": 1}, "x.feature"),
        (weir.SetFeature, {"feature": 1, "value": 1}, "x.name"),
        (weir.SetFeature, {"name": "a", "feature": -1, "value": 1}, "x.feature"),
        (weir.SetFeature, {"name": "a", "feature": "1", "value": 1}, "x.feature"),
        (weir.SetFeature, {"name": "a", "feature": 1}, "x.value"),
        (weir.SetFeature, {"name": "a", "feature": 1, "value": 1, "add": 1}, "x.value"),
        (weir.SetFeature, {"name": "a", "feature": 1, "value": "1"}, "x.value"),
        (weir.SetFeature, {"name": "a", "feature": 1, "scale": float("nan")}, "x.scale"),
        (weir.SetFeature, {"name": "a", "feature": 1, "add": 1e39}, "x.add"),
        (weir.SetFeature, {"name": "a", "feature": 1, "add": 1, "op": "add"}, "x.op"),
        (weir.SetFeature, {"name": "a", "feature": 1, "add": 1, "layers": 3}, "x.layers"),
        (weir.Lens, {"kind": "telescope"}, "x.kind"),
        (weir.Lens, {"kind": ["logit"]}, "x.kind"),
        (weir.Lens, {"kind": "tuned"}, "x.path"),
        (weir.Lens, {"kind": "tuned", "path": ""}, "x.path"),
        (weir.Lens, {"kind": "logit", "path": "a"}, "x.path"),
        (weir.Lens, {"layers": []}, "x.layers"),
        (weir.Lens, {"layers": -1}, "x.layers"),
        (weir.Lens, {"top_k": 0}, "x.top_k"),
        (weir.Lens, {"at": "y"}, "x.at"),
        (weir.Lens, [], "x"),
        (weir.SetFeature, None, "x"),
    ],
)
def test_wrong_fields_are_named(kind, wire, field):
    with pytest.raises(WeirError) as e:
        kind.from_json(wire, "x")
    assert e.value.field == field


def test_fields_have_the_path_of_the_call():
    for name, kind in ASKED.items():
        with pytest.raises(WeirError) as e:
            kind.from_json({"nonsense": 1})
        assert e.value.field == f"{name}.nonsense"


def test_targets():
    assert weir.SetFeature("a", 1, value=0).target(5.0) == 0
    assert weir.SetFeature("a", 1, scale=2).target(5.0) == 10
    assert weir.SetFeature("a", 1, add=-2).target(5.0) == 3


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just(10**400))
junk = st.one_of(scalars, st.lists(scalars, max_size=3), st.dictionaries(st.text(max_size=3), scalars, max_size=2))


@given(
    st.sampled_from(sorted(ASKED)),
    st.dictionaries(
        st.sampled_from(
            ["name", "top_k", "ids", "positions", "feature", "value", "scale", "add", "kind", "layers", "path"]
        ),
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
