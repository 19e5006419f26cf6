"""`Routing` and its wire form, and what workers report of their routers."""

from __future__ import annotations

import pytest

import vllm_weir as weir
from vllm_weir.errors import WeirError
from vllm_weir.schema.replay import parse_routing
from vllm_weir.schema.request import RequestSpec
from vllm_weir.schema.routing import NO_EXPERTS, NOT_REPORTED, ModelRouting, RoutedBlocks

FIRST, SECOND = ({"refused": "", "blocks": [1, 2], "experts": 8, "top_k": 2}, {"blocks": [3], "experts": 8, "top_k": 2})


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        (None, None),
        (False, None),
        (True, weir.Routing()),
        ({}, weir.Routing()),
        ({"weights": True}, weir.Routing(weights=True)),
        (weir.Routing(True, 3), weir.Routing(weights=True, prompt_start=3)),
    ],
)
def test_what_is_asked(given, parsed):
    assert parse_routing(given, "routing") == parsed
    wire = RequestSpec(routing=parsed).to_json()
    assert ("routing" in wire) is (parsed is not None) and RequestSpec.parse(wire).routing == parsed


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ("all", "routing"),
        (1, "routing"),
        ({"weight": True}, "routing.weight"),
        ({"weights": 1}, "routing.weights"),
        ({"prompt_start": -1}, "routing.prompt_start"),
        ({"prompt_start": True}, "routing.prompt_start"),
        ({"prompt_start": 1.5}, "routing.prompt_start"),
    ],
)
def test_what_is_refused(given, field):
    with pytest.raises(WeirError) as e:
        parse_routing(given, "routing")
    assert e.value.field == field


def reported(*told):
    return ModelRouting.merge([{"routers": one} for one in told], 4)


def test_stages_and_ranks_are_joined():
    model = reported(FIRST, FIRST, SECOND, {"refused": ""})
    assert model.stages == (RoutedBlocks((1, 2), 8, 2), RoutedBlocks((3,), 8, 2)) and not model.refused
    assert [stage.site.layer for stage in model.stages] == [2, 3]


def test_why_there_is_none():
    assert reported({"refused": ""}).refused == NO_EXPERTS and reported(FIRST, {"refused": "it is fused"}).refused
    assert "different numbers" in reported(FIRST, SECOND | {"top_k": 3}).refused
    assert ModelRouting.merge([{}], 4).refused == NOT_REPORTED
