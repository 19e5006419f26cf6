"""The planner's promises under random batches: every wanted (site, position) gets one row, and nothing else does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.check import expected_positions
from tests.unit.wishes import sensible_captures
from vllm_weir import Site, WeirError
from vllm_weir.spec.positions import Positions
from vllm_weir.spec.request import ResolvedSpec, Wish
from vllm_weir.spec.sizes import Sizes
from vllm_weir.worker.plan import Planner
from vllm_weir.worker.programs import ProgramTable
from vllm_weir.worker.select import STAGES, column_of

LAYERS = 4

COLUMNS = frozenset(range((LAYERS + 1) * STAGES))


def spec_of(captures) -> ResolvedSpec:
    wishes = []
    for hook, layers, positions in captures:
        for layer in range(LAYERS) if layers == "all" else layers:
            wishes.append(Wish(Site(hook, layer), Positions.parse(positions), False))
    return ResolvedSpec(tuple(wishes))


def rows_of(plan, planner, batch):
    """(request, column, position) -> ring row, read off the entries and, apart from them, off the device tables."""
    by_entries, by_tables = {}, {}
    for entry in plan.entries:
        for i, position in enumerate(entry.positions):
            for k, column in enumerate(entry.columns):
                key = (entry.request_id, column, int(position))
                assert key not in by_entries
                by_entries[key] = entry.start + i * len(entry.columns) + k
    token = 0
    for request_id, n, computed in batch:
        for position in range(computed, computed + n):
            slot, profile = plan.slots[token], plan.profiles[token]
            assert (slot < 0) == (profile < 0)
            if slot >= 0:
                for column in np.flatnonzero(planner.ranks[profile] >= 0):
                    by_tables[request_id, int(column), position] = int(slot + planner.ranks[profile, column])
            token += 1
    assert len(plan.slots) == len(plan.profiles) == token
    assert by_entries == by_tables
    assert sorted(by_entries.values()) == list(range(plan.rows)), "rows overlap or leave gaps"
    return by_entries


def planner_of(columns, profiles):
    return Planner(
        columns, (LAYERS + 1) * STAGES, profiles, ProgramTable(Sizes(4, 4, 4), LAYERS + 1, range(LAYERS + 1), 8)
    )


def step(planner, batch):
    names, counts, computed = zip(*batch, strict=True)
    return planner.plan(names, counts, computed)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_every_wanted_row_exactly_once(data):
    """Random wishes, chunkings, batch orders, joins, leaves, recomputations, neighbours without wishes."""
    planner = planner_of(COLUMNS, 512)
    count = data.draw(st.integers(1, 5))
    state = {}
    for i in range(count):
        P, G = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 8))
        ids = data.draw(st.lists(st.integers(0, 20), min_size=P + G, max_size=P + G))
        captures = data.draw(sensible_captures(LAYERS)) if data.draw(st.integers(0, 3)) else None
        state[f"r{i}"] = {"P": P, "G": G, "ids": ids, "captures": captures, "at": 0, "rows": {}, "joined": False}
    for _ in range(200):
        live = [name for name, s in state.items() if s["at"] < s["P"] + s["G"] - 1]
        if not live:
            break
        batch = []
        for name in data.draw(st.permutations(live)):
            s = state[name]
            if not s["joined"]:
                if data.draw(st.booleans()):
                    continue
                s["joined"] = True
                if s["captures"] is not None:
                    planner.read(
                        name, data.draw(st.sampled_from("ab")), spec_of(s["captures"]), s["P"], s["ids"][: s["P"]]
                    )
            if s["at"] > 1 and not data.draw(st.integers(0, 7)):
                s["at"] = data.draw(st.integers(0, s["at"] - 1))  # preempted: computed again from there
            n = data.draw(st.integers(1, s["P"] - s["at"])) if s["at"] < s["P"] else 1
            batch.append((name, n, s["at"]))
        if not batch:
            continue
        plan = step(planner, batch)
        found = rows_of(plan, planner, batch) if plan is not None else {}
        assert plan is None or found
        if plan is not None:
            replies = [planner.reading[e.request_id].reply for e in plan.entries]
            assert replies == sorted(replies)
        for name, n, computed in batch:
            s = state[name]
            wanted = _wanted(s, range(computed, computed + n))
            assert {(c, p) for r, c, p in found if r == name} == wanted
            s["at"] = computed + n
            if s["at"] >= s["P"] + s["G"] - 1:
                planner.remove(name)
    for name in state:
        planner.remove(name)
    assert_free(planner, 512)


def _wanted(s, positions):
    """Columns and positions; a token-id selector takes every generated row, since its token is not known yet."""
    pairs = set()
    for hook, layers, selector in s["captures"] or ():
        at = set(expected_positions(selector, s["P"], s["G"], s["ids"]))
        if isinstance(selector, dict):
            at |= set(range(s["P"], s["P"] + s["G"]))
        for layer in range(LAYERS) if layers == "all" else layers:
            pairs |= {(column_of(Site(hook, layer), False), p) for p in positions if p in at}
    return pairs


def assert_free(planner, size):
    assert not planner.reading and not planner._users and not planner._profile_of and not planner._columns_of
    assert sorted(planner._free) == list(range(size))


def test_columns_are_distinct_and_of_their_tap():
    sites = [Site(h, i) for h in ("resid_pre", "resid_post") for i in range(LAYERS)]
    for before in (True, False):
        columns = [column_of(s, before) for s in sites]
        assert len(set(columns)) == len(columns) and set(columns) <= COLUMNS
    for layer in range(1, LAYERS):
        # After the one block's interventions is before the next one's.
        assert column_of(Site("resid_post", layer - 1), False) == column_of(Site("resid_pre", layer), True)


def test_profiles_are_shared_and_freed():
    planner = planner_of(COLUMNS, 2)
    wish = spec_of([("resid_post", [1], "all")])
    for i in range(50):
        planner.read(f"r{i}", "a", wish, 5, None)
    batch = [(f"r{i}", 1, 0) for i in range(50)]
    assert len({int(p) for p in step(planner, batch).profiles}) == 1
    planner.remove("r0")
    planner.read("r0", "a", spec_of([("resid_post", [2], "all")]), 5, None)  # joins again under its id
    assert len({int(p) for p in step(planner, batch).profiles}) == 2
    planner.read("x", "a", spec_of([("resid_post", [3], "all")]), 5, None)
    with pytest.raises(WeirError, match="more than 2"):
        step(planner, [("x", 1, 0)])
    planner.remove("r0")
    assert step(planner, [("x", 1, 0)]).rows == 1
    for name in ["x", "nobody", *(f"r{i}" for i in range(50))]:
        planner.remove(name)
    assert_free(planner, 2)


def test_63_selectors_in_one_request():
    planner = planner_of(COLUMNS, 512)
    planner.read("r", "a", spec_of([("resid_post", [i % LAYERS], [i]) for i in range(63)]), 70, None)
    found = rows_of(step(planner, [("r", 70, 0)]), planner, [("r", 70, 0)])
    assert {(c, p) for _, c, p in found} == {(column_of(Site("resid_post", i % LAYERS), False), i) for i in range(63)}


def test_a_stage_of_a_pipeline_fills_its_own_columns_only():
    mine = frozenset(c for c in COLUMNS if c // STAGES >= 3)
    planner = planner_of(mine, 16)
    planner.read("none", "a", spec_of([("resid_post", [0, 1], "all")]), 3, None)
    assert not planner.reading and step(planner, [("none", 3, 0)]) is None
    planner.read("some", "a", spec_of([("resid_post", "all", "all")]), 3, None)
    plan = step(planner, [("none", 3, 0), ("some", 3, 0)])
    assert plan.rows == 6 and set(plan.entries[0].columns) <= mine


def test_request_ids_match_whole():
    planner = planner_of(COLUMNS, 16)
    planner.read("a", "x", spec_of([("resid_post", [0], "all")]), 3, None)
    assert step(planner, [("a-b", 3, 0), ("ab", 3, 0)]) is None
    planner.remove("a-b")
    assert step(planner, [("a-b", 3, 0), ("a", 3, 0)]).slots.tolist() == [-1, -1, -1, 0, 1, 2]
