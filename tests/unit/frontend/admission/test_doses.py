"""Requests that measure doses: what travels, what they need of the tables, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.refusals import refused
from tests.unit.request_strategies import served
from vllm_weir import Ablate, Add
from vllm_weir.frontend.admission.admit import admit
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.engine_wire import make_engine_request
from vllm_weir.schema.engine_spec import EngineSpec
from vllm_weir.schema.engine_traits import TableSizes
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.request import MEASURE_DOSE, RequestSpec, parse_interventions
from vllm_weir.schema.rows import Shard

D, LAYERS, P, G = 8, 4, 6, 5
FACTS = EngineCapabilities(served(LAYERS), LAYERS, D, "float32", 1024)
ADD = Add(np.ones(D), "all")


def admitted(*items, dose=True, facts=FACTS, always=()):
    spec = RequestSpec(interventions=parse_interventions(list(items), "interventions"), dose=dose)
    return admit({"weir": spec.to_json()}, facts, always=always)


def needs(found, **sizes):
    tables = TableSizes(**{"vectors": 64, "programs": 64, "nodes": 1024} | sizes)
    return make_engine_request(found, "reply", tuple(range(P)), P, G, FACTS, 1, tables).table_needs


def test_the_default_is_to_measure_nothing():
    assert MEASURE_DOSE is False and "dose" not in RequestSpec().to_json()
    assert RequestSpec.parse({"v": 1, "dose": True}).dose and not RequestSpec.parse({"v": 1}).dose
    assert RequestSpec(dose=True).to_json()["dose"] is True
    with refused("dose", "dose is true or false, got str"):
        RequestSpec.parse({"v": 1, "dose": "yes"})


def test_it_travels_and_leaves_the_interventions_as_they_are():
    """So that keys of the prefix cache are the same."""
    plain, measured = admitted(ADD, dose=False), admitted(ADD)
    assert plain.effective == measured.effective and plain.digests == measured.digests
    spec = EngineSpec.from_wire(measured.wire)
    assert spec.dose and list(spec.moves) == measured.effective and spec.scoring.doses == LAYERS
    assert EngineSpec.from_wire(plain.wire).scoring is None
    assert measured.cells.reported == LAYERS and plain.cells.reported == 0
    assert [step.dose_cell for step in admitted(ADD, Ablate(np.ones(D), 1)).steps] == [1, 5]


@pytest.mark.parametrize("second", ["all", "generated"])
def test_an_instruction_more_for_each_intervention_at_each_block(second):
    items = ADD, Ablate(np.eye(D)[:2], [1, 2], positions=second)
    plain, measured = needs(admitted(*items, dose=False)), needs(admitted(*items))
    times = 1 if second == "all" else 2  # programs that have the addition
    assert plain.programs == measured.programs == times
    assert measured.instructions - plain.instructions == times * LAYERS + 2


def test_global_interventions_are_measured_for_those_that_ask():
    assert admitted(always=(ADD,)).cells.reported == LAYERS
    assert admitted(dose=False, always=(ADD,)).cells.reported == 0


def test_more_than_there_is_room_for_is_refused():
    assert needs(admitted(ADD, ADD), cells=2 * LAYERS)
    with refused("dose", r"8 numbers for each token.*room for 7;.*probe_cells"):
        needs(admitted(ADD, ADD), cells=7)


@pytest.mark.parametrize(
    ("facts", "why", "fits"),
    [
        ({"shards": {Site("resid_post", 2): (Shard(0, 4), Shard(4, 8))}},
         r"resid_post\[2\].* in 2 parts.*leave dose out", 1),
        ({"workers": {Site("resid_post", k): frozenset({k // 2}) for k in range(LAYERS)}},
         r"a measured add acts at .*another pipeline stage", [0, 1]),
    ],
    ids=["in parts", "on several stages"],
)  # fmt: skip
def test_rows_in_parts_and_on_several_pipeline_stages_are_refused(facts, why, fits):
    facts = replace(FACTS, **facts)
    with refused("dose", why):
        admitted(ADD, facts=facts)
    assert admitted(ADD, dose=False, facts=facts) and admitted(Add(np.ones(D), fits), facts=facts)
