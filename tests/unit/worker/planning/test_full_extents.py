"""Captured positions that take more than one extent of the host buffer."""

from __future__ import annotations

import pytest

from vllm_weir import Site
from vllm_weir.schema.engine_traits import TableSizes
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import ResolvedSpec, SiteRequest
from vllm_weir.schema.taps import STAGES, num_taps
from vllm_weir.worker.planning.arena import Arena
from vllm_weir.worker.planning.planner import Planner
from vllm_weir.worker.planning.row_sequences import RowSequences
from vllm_weir.worker.steering.programs import ProgramTable

SOME = [0, 1, 3, 7, 8, 9, 12, 13, 14, 15, 20, 22]


@pytest.mark.parametrize(
    ("positions", "prompt_len", "wanted"),
    [("all", 12, list(range(12))), ("0:24:2", 24, list(range(0, 24, 2))), (SOME, 24, SOME)],
)
def test_positions_go_on_in_a_second_extent(positions, prompt_len, wanted):
    taps, selector = num_taps(1), Positions.parse(positions)
    planner = Planner(
        frozenset(range(taps * STAGES)), taps * STAGES, 4, ProgramTable(TableSizes(1, 1, 1), taps, range(taps), 8),
        RowSequences(Arena(16)),
    )  # fmt: skip
    spec = ResolvedSpec((SiteRequest(Site("resid_post", 0), selector, False),))
    planner.add_capture("r", "reader", spec, prompt_len, None, 1)
    plan = planner.plan(["r"], [prompt_len], [0])
    assert len(planner.row_seqs.layout_update_for("reader").placed) == 2
    assert sorted(plan.captured_tokens.tolist()) == wanted
    assert len(set(plan.copies["arena_row"].tolist())) == len(wanted)
    told = {
        rank + k: position + k * stride
        for _, rank, position, count, stride in plan.arrivals["reader"].tolist()
        for k in range(count)
    }
    assert [told[rank] for rank in sorted(told)] == wanted and sorted(told) == list(range(len(wanted)))
