"""The planner's promises under random batches: every wanted (site, position) gets one row, and nothing else does."""

from __future__ import annotations

import numpy as np

from vllm_weir import Site
from vllm_weir.schema.compression import Compression
from vllm_weir.schema.engine_traits import TableSizes
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import Postprocess, ResolvedSpec, SiteRequest
from vllm_weir.schema.taps import STAGES, column_of, num_taps, tap_of
from vllm_weir.worker.planning.planner import Planner
from vllm_weir.worker.steering.programs import ProgramTable

LAYERS = 4

COLUMNS = frozenset(range(num_taps(LAYERS) * STAGES))


def spec_of(captures, compress=None) -> ResolvedSpec:
    site_requests = []
    for hook, layers, positions in captures:
        for layer in range(LAYERS) if layers == "all" else layers:
            site_requests.append(SiteRequest(Site(hook, layer), Positions.parse(positions), False))
    return ResolvedSpec(tuple(site_requests), compress and Postprocess(None, (), Compression.parse(compress)))


def places_of(plan):
    """Token -> where its rows or records go; rows in arena rows, records in bytes that follow each other."""
    token_at = {int(plan.slots[t]): t for t in plan.captured_tokens.tolist()}
    assert (plan.records["codec"] >= 0).all()
    out = {token_at[slot]: tuple(rest) for slot, *rest in plan.copies.tolist()}
    for slot, place, size, columns, codec in plan.records.tolist():
        assert size == columns * 16, "eight values: two floats and eight codes, or eight halves"
        out[token_at[slot]] = (place, size, codec)
    assert len(out) == len(plan.captured_tokens)
    return out


def rows_of(plan, planner, batch):
    """{(request, column, position)} of what is recorded; every ring row of the step is used once."""
    found, used = [], np.zeros(plan.rows, int)
    token = 0
    for request_id, n, computed in batch:
        for position in range(computed, computed + n):
            slot, site_set = plan.slots[token], plan.site_sets[token]
            assert (slot < 0) == (site_set < 0)
            if slot >= 0:
                for column in np.flatnonzero(planner.site_sets.ranks[site_set] >= 0):
                    found.append((request_id, int(column), position))
                    used[slot + planner.site_sets.ranks[site_set, column]] += 1
            token += 1
    assert len(plan.slots) == len(plan.site_sets) == token
    assert (used == 1).all(), "rows overlap or leave gaps"
    assert len(set(found)) == len(found)
    return set(found)


def planner_of(columns, max_site_sets):
    taps = num_taps(LAYERS)
    return Planner(columns, taps * STAGES, max_site_sets, ProgramTable(TableSizes(4, 4, 4), taps, range(taps), 8))


def step(planner, batch):
    names, counts, computed = zip(*batch, strict=True)
    return planner.plan(list(names), counts, computed)  # as vLLM gives them: a repeated step is known by its list


def flat(arrivals):
    """(row sequence, rank, position) of every row."""
    return [
        (row_seq, rank + k, position + k * stride)
        for row_seq, rank, position, count, stride in arrivals.tolist()
        for k in range(count)
    ]


def test_a_step_that_repeats_the_last_one_is_recognised():
    planner = planner_of(COLUMNS, 8)
    names = [f"r{i}" for i in range(20)]
    for name in names:
        planner.add_capture(name, "a", spec_of([("resid_post", "all", "all")]), 3, None, 400)
    batch = [(name, 3, 0) for name in names]
    for position in range(3, 300):
        plan = step(planner, batch)
        assert plan.rows == sum(n for _, n, _ in batch) * LAYERS
        batch = [(name, 1, position) for name in names]
        if position == 6:
            assert planner._repeated is not None
    planner.row_seqs.catch_up()
    assert planner.row_seqs.last_position[[s.index for s in planner.row_seqs.live.values()]].tolist() == [298] * 20


def assert_free(planner, size):
    site_sets = planner.site_sets
    assert not planner.capturing and not len(site_sets) and not site_sets._number_of and not site_sets.columns_of
    assert sorted(site_sets._free) == list(range(size))


def test_rows_that_are_kept_go_to_their_worker_sink_in_every_step():
    """Its neighbour's go to the reader of both; a repeated step must not mix them up."""
    planner = planner_of(COLUMNS, 8)
    for name, worker_sink in (("kept", "k"), ("sent", "")):
        planner.add_capture(name, "reader", spec_of([("resid_post", [1], "all")]), 3, None, worker_sink=worker_sink)
    for computed, count in ((0, 3), (3, 1), (4, 1), (5, 1)):
        plan = planner.plan(["kept", "sent"], [count, count], [computed, computed])
        assert {to: arrivals["position"].tolist() for to, arrivals in plan.arrivals.items()} == {
            "k": [computed], "reader": [computed],
        }  # fmt: skip
    updates = planner.row_seqs.take_layout_updates()
    assert {to: [one.request_id for one in update.opened] for to, update in updates.items()} == {
        "k": ["kept"], "reader": ["sent"],
    }  # fmt: skip


def test_site_sets_are_shared_and_freed():
    planner = planner_of(COLUMNS, 2)
    site_request = spec_of([("resid_post", [1], "all")])
    for i in range(50):
        planner.add_capture(f"r{i}", "a", site_request, 5, None)
    batch = [(f"r{i}", 1, 0) for i in range(50)]
    assert len({int(p) for p in step(planner, batch).site_sets}) == 1
    planner.remove("r0")
    planner.add_capture("r0", "a", spec_of([("resid_post", [2], "all")]), 5, None)  # joins again under its id
    assert len({int(p) for p in step(planner, batch).site_sets}) == 2
    planner.add_capture("x", "a", spec_of([("resid_post", [3], "all")]), 5, None)
    ((reply, name, reason),) = step(planner, [("x", 1, 0), ("r1", 1, 3)]).failures
    assert (reply, name) == ("a", "x") and "more than 2" in reason
    planner.remove("r0")
    planner.add_capture("x", "a", spec_of([("resid_post", [3], "all")]), 5, None)
    assert step(planner, [("x", 1, 0)]).rows == 1
    for name in ["x", "nobody", *(f"r{i}" for i in range(50))]:
        planner.remove(name)
    assert_free(planner, 2)


def test_63_selectors_in_one_request():
    planner = planner_of(COLUMNS, 512)
    planner.add_capture("r", "a", spec_of([("resid_post", [i % LAYERS], [i]) for i in range(63)]), 70, None)
    found = rows_of(step(planner, [("r", 70, 0)]), planner, [("r", 70, 0)])
    assert {(c, p) for _, c, p in found} == {(column_of(Site("resid_post", i % LAYERS), False), i) for i in range(63)}


def test_a_stage_of_a_pipeline_fills_its_own_columns_only():
    mine = frozenset(c for c in COLUMNS if c // STAGES > tap_of(Site("resid_post", 1)))
    planner = planner_of(mine, 16)
    planner.add_capture("none", "a", spec_of([("resid_post", [0, 1], "all")]), 3, None)
    assert not planner.capturing and step(planner, [("none", 3, 0)]) is None
    planner.add_capture("some", "a", spec_of([("resid_post", "all", "all")]), 3, None)
    plan = step(planner, [("none", 3, 0), ("some", 3, 0)])
    assert plan.rows == 6 and {c for _, c, _ in rows_of(plan, planner, [("none", 3, 0), ("some", 3, 0)])} <= mine


def test_request_ids_match_whole():
    planner = planner_of(COLUMNS, 16)
    planner.add_capture("a", "x", spec_of([("resid_post", [0], "all")]), 3, None)
    assert step(planner, [("a-b", 3, 0), ("ab", 3, 0)]) is None
    planner.remove("a-b")
    assert step(planner, [("a-b", 3, 0), ("a", 3, 0)]).slots.tolist() == [-1, -1, -1, 0, 1, 2]


def test_a_repeated_step_does_not_write_where_an_extent_was_retired():
    """Readers may have emptied a retired extent, and others been given its memory."""
    planner = planner_of(COLUMNS, 8)
    planner.add_capture("r", "a", spec_of([("resid_post", [1], "all")]), 3, None, 400)
    for batch in ([("r", 3, 0)], [("r", 1, 3)], [("r", 1, 4)]):
        step(planner, batch)
    assert planner._repeated is not None
    planner.row_seqs.retire_all()
    (retired,) = planner.row_seqs.take_layout_updates()["a"].retired
    plan = step(planner, [("r", 1, 5)])
    (placed,) = planner.row_seqs.take_layout_updates()["a"].placed
    assert (retired.rank, retired.filled) == (0, 5) and (placed.rank, plan.copies["arena_row"][0]) == (5, placed.start)
