"""How many rows a server lets come back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.request_strategies import sensible_captures, served
from vllm_weir import Capture, Site, WeirError
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.admission.admitted import NUMBERS_PER_ROW, check_rows
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.read_outs import AskedReadOut
from vllm_weir.frontend.derived.recipe import AttentionRecipe, RoutingRecipe
from vllm_weir.schema.model_facts import AttentionFacts, RoutingFacts
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.read_outs import ReadOut
from vllm_weir.schema.request import RequestSpec, selected

LAYERS = 4
FACTS = EngineCapabilities(served(LAYERS), LAYERS, 128, "float32", 1024)


@given(captures=sensible_captures(LAYERS), P=st.integers(1, 30), G=st.integers(1, 30), short=st.integers(-1, 3))
def test_a_server_returns_no_more_rows_than_it_is_to(captures, P, G, short):
    """At most as many as there are may come back; where tokens choose, as many as there could be."""
    spec = RequestSpec(tuple(Capture(h, layers, p) for h, layers, p in captures))
    admitted = admit({"weir": spec.to_json()}, FACTS)
    rows = 0
    for sites, selectors in admitted.parts[0].spec.by_positions:
        if any(s.needs_token_ids for s in selectors):
            rows += len(sites) * (P + G - 1)
        else:
            rows += len(sites) * len(selected(selectors, P, np.full(P + G - 1, -1)))
    if 0 <= rows - short < rows:
        with pytest.raises(WeirError, match=f"up to {rows} rows would come back"):
            check_rows(admitted, P, G, 128, rows - short)
    else:
        check_rows(admitted, P, G, 128, max(rows - short, rows))


def project(layers):
    row = np.ones(128, np.float32)
    return {"hook": "resid_post", "layers": layers, "project": [(row * k).tolist() for k in range(1, 33)]}


def read_out(kind, layer, width, positions="all"):
    ids = tuple(range(width)) if kind == "features" else ()
    return AskedReadOut(layer, ReadOut(kind, Site("resid_post", layer), "", width, ids), Positions(positions), "")


SPARSE = read_out("features", 1, 700)


@pytest.mark.parametrize(
    ("asked", "more", "numbers", "field"),
    [
        ({"capture": [project([0, 1])]}, (), 2 * 32 * 95, "capture"),
        ({"capture": [project([0]), project([1, 2]) | {"positions": "prompt"}]}, (), 32 * (95 + 2 * 80), "capture"),
        ({}, [read_out("lens", layer, 500, "generated") for layer in range(3)], 3 * 2 * 500 * 15, "lens"),
        ({}, (SPARSE,), 2 * 700 * 95, "features"),
        ({"capture": [{"hook": "resid_post", "layers": [0]}]}, (SPARSE,), 2 * 700 * 95, "features"),
    ],
)
def test_whatever_comes_back_beside_rows_is_bounded_too(asked, more, numbers, field):
    """Products, features and the lens: 80 tokens of a prompt, 16 generated, of which the last has no row."""
    admitted = admit({"weir": {"v": 1, **asked}}, FACTS)
    part = admitted.parts[0]
    admitted = replace(admitted, parts=(replace(part, read_outs=(*part.read_outs, *more)), *admitted.parts[1:]))
    check_rows(admitted, 80, 16, 128, -(-numbers // NUMBERS_PER_ROW))
    with pytest.raises(WeirError, match=f"up to {numbers} numbers would come back") as raised:
        check_rows(admitted, 80, 16, 128, (numbers - 1) // NUMBERS_PER_ROW)
    assert raised.value.field == field


def test_what_is_reduced_comes_back_once():
    check_rows(admit({"weir": {"v": 1, "capture": [project([0, 1]) | {"reduce": "mean"}]}}, FACTS), 80, 16, 128, 1)


def pattern(heads):
    return AttentionRecipe(Site("pattern", 0), ALL, (), False, AttentionFacts(8, 16), heads, torch.float32)


ALL = (Positions("all"),)


@pytest.mark.parametrize(
    ("recipe", "rows"),
    [
        (pattern(None), 6),
        (pattern((3,)), 1),
        (RoutingRecipe(Site("expert_ids", 0), ALL, (), False, RoutingFacts(4), torch.int64), 1),
    ],
)
def test_a_derived_row_counts_as_what_it_fills(recipe, rows):
    """Eight heads times 80 + 15 keys are 760 values, 5.9 rows of 128, at each of 95 positions."""
    memory = admit({}, FACTS).parts[0]
    admitted = replace(admit({}, FACTS), parts=(replace(memory, recipes=(recipe,)),))
    check_rows(admitted, 80, 16, 128, 95 * rows)
    with pytest.raises(WeirError, match=f"up to {95 * rows} rows would come back"):
        check_rows(admitted, 80, 16, 128, 95 * rows - 1)
