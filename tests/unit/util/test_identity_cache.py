"""What is made of a shared thing is made once, and never mistaken for another's."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.request_strategies import selectors
from vllm_weir import Site
from vllm_weir.schema import selectors as select
from vllm_weir.schema.engine_spec import EngineSpec
from vllm_weir.schema.engine_traits import TableSizes
from vllm_weir.schema.instructions import CONST, Instruction, ResolvedIntervention
from vllm_weir.schema.positions import ENDLESS, Positions
from vllm_weir.schema.request import ResolvedSpec, SiteRequest
from vllm_weir.schema.selectors import Selectors
from vllm_weir.schema.taps import num_taps
from vllm_weir.util import lru
from vllm_weir.util.lru import IdentityCache
from vllm_weir.worker.planning.arena import Arena
from vllm_weir.worker.planning.planner import NO_PROBES
from vllm_weir.worker.planning.row_sequences import RowSequences
from vllm_weir.worker.planning.score_planner import ScorePlanner
from vllm_weir.worker.planning.steering_planner import MOST_CACHED, SteeringPlanner
from vllm_weir.worker.scoring.probe_table import ProbeTable
from vllm_weir.worker.steering.programs import ProgramTable


def test_it_is_made_once_for_each_thing():
    made = []
    lengths = IdentityCache(lambda thing: made.append(thing) or len(thing))
    one, equal = [1, 2], [1, 2]
    assert [lengths[one], lengths[one], lengths[equal], lengths[one]] == [2] * 4
    assert len(made) == 2 and made[0] is one and made[1] is equal


def test_a_thing_that_has_gone_leaves_its_place_to_nobody(monkeypatch):
    """Ids are used again; with few places, everything is forgotten now and then."""
    monkeypatch.setattr(lru, "MAX_ENTRIES", 8)
    firsts = IdentityCache(lambda thing: thing[0])
    for k in range(1000):
        assert firsts[[k]] == k
        gc.collect(0)
    assert len(firsts) <= 8


def test_what_cannot_be_made_is_tried_again():
    tries = []

    def make(thing):
        tries.append(thing)
        if len(tries) == 1:
            raise ValueError("not yet")
        return "made"

    somehow, thing = IdentityCache(make), object()
    with pytest.raises(ValueError):
        somehow[thing]
    assert somehow[thing] == "made" and somehow[thing] == "made" and len(tries) == 2


@given(
    chosen=st.lists(selectors(), min_size=1, max_size=3),
    P=st.integers(1, 20),
    asked=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 7)), min_size=1, max_size=60),
    places=st.sampled_from([1, 2, 16]),
)
def test_what_is_remembered_of_steps_is_what_would_be_found(chosen, P, asked, places):
    distinct = list(dict.fromkeys(map(Positions.parse, chosen)))
    ids = [k % 5 for k in range(P)]
    remembering = Selectors(distinct, P, ids)
    before, select.MOST_STEPS = select.MOST_STEPS, places
    try:
        for start, end, code in asked:
            fresh = Selectors(distinct, P, ids)
            assert remembering.runs(start, end) == fresh.runs(start, end)
            assert remembering.count(code, start, end) == fresh.count(code, start, end)
            assert len(remembering._runs) <= places and len(remembering._counts) <= places
    finally:
        select.MOST_STEPS = before


@given(chosen=st.lists(selectors(), min_size=1, max_size=3), P=st.integers(1, 20))
def test_where_a_request_s_wishes_end(chosen, P):
    """No position after a prompt of at least that length is selected; where the end is known, it is the shortest."""
    spec = EngineSpec(
        ResolvedSpec(tuple(SiteRequest(Site("resid_post", 0), Positions.parse(s), False) for s in chosen))
    )
    after = np.arange(P, P + 60)
    tokens = np.zeros(60, np.int64)
    wanted = [s.needs_token_ids or s.mask(after, P, tokens).any() for s in spec.selectors]
    if spec.end <= P:
        assert not any(wanted)
    if {s.kind for s in spec.selectors} == {"list"}:
        assert spec.end == max([0, *(v + 1 for s in spec.selectors for v in s.values)])
    if any(s.kind in ("all", "generated", "sampled") or s.needs_token_ids for s in spec.selectors):
        assert spec.end == ENDLESS


def test_recipes_of_many_instructions_are_not_kept():
    """They may be megabytes each."""
    table = ProgramTable(TableSizes(400, 400, 1000), num_taps(3), range(num_taps(3)), 4)
    row_seqs = RowSequences(Arena(100))
    score_planner = ScorePlanner(ProbeTable(NO_PROBES, table), table, row_seqs)
    steering_planner = SteeringPlanner(table, row_seqs, score_planner)
    rows = {f"v{k}": np.full(4, float(k), np.float32) for k in range(1, MOST_CACHED + 2)}
    for count, kept in ((MOST_CACHED, 1), (MOST_CACHED + 1, 1)):
        terms = tuple(Instruction(CONST, f"v{k}", None, a=1.0) for k in range(1, count + 1))
        moves = (ResolvedIntervention("resid_post", (1,), Positions("all"), False, terms),)
        for name in "ab":
            steering = steering_planner.join(
                name, "here", moves, 3, [1, 2, 3], lambda digests: {d: rows[d] for d in digests}
            )
            assert len(steering.recipe.vectors) == count
        assert len(steering_planner._recipes) == kept
