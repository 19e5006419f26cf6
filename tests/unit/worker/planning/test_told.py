"""What a step tells, and whom: one reader of several, tokens that no draft decides on, requests that failed, means."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tests.unit.worker.planning.test_planner import COLUMNS, planner_of, step
from vllm_weir import Site
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import Postprocess, ResolvedSpec, SiteRequest
from vllm_weir.schema.rows import COMPLETE, CONTINUED, GROUP
from vllm_weir.worker.planning.columns import ARRIVAL
from vllm_weir.worker.planning.drafts import VerifiedTokens
from vllm_weir.worker.planning.plan_builder import PlanBuilder
from vllm_weir.worker.planning.score_builder import ByEndpoint


def test_a_reader_who_is_told_nothing_shifts_no_other_s():
    told = ByEndpoint(ARRIVAL)
    rows = np.zeros(3, ARRIVAL)
    rows["position"] = 7, 8, 9
    told.add(np.array([2, 0, 2]), rows, np.arange(3))
    assert {e: r["position"].tolist() for e, r in told.sorted("abc").items()} == {"a": [8], "c": [7, 9]}
    assert {e: t.tolist() for e, t in told.tokens("abc").items()} == {"a": [1], "c": [0, 2]}


def test_what_no_draft_decides_on_stays_where_it_is():
    """The request's step was planned two positions ahead; what was found in the prefix cache was not."""
    verified = VerifiedTokens(first_tokens=np.array([0]), ends=np.array([3]), shifts=np.array([2]))
    entries = np.array([(0, 0, 5, 4, 1), (0, 4, 12, 4, 1)], ARRIVAL)
    kept = verified.keep(entries, np.array([-1, 0]))
    assert kept[["position", "count"]].tolist() == [(5, 4), (10, 3)]


def test_nothing_of_a_request_that_failed_is_copied():
    builder, positions = PlanBuilder(6), np.arange(2)
    for number, first in ((0, 0), (1, 3)):
        row_seq = SimpleNamespace(number=number, rank_size=2, ring_rows=2, codec=-1)
        builder.capture_some(0, row_seq, 0, 10 * number, first + positions, positions, site_set=0)
    builder.cancel(0, 3)
    plan = builder.finish(["reader"])
    copied = plan.copies[plan.copies["rows"] > 0]
    assert copied["arena_row"].tolist() == [10, 12] and copied["ring_row"].tolist() == [0, 2] and plan.rows == 4
    assert plan.slots.tolist() == [-1, -1, -1, 0, 2, -1]


@pytest.mark.parametrize(
    ("last", "position", "resumed"),
    [(5, 9, CONTINUED), (5, GROUP, COMPLETE), (GROUP - 1, GROUP, COMPLETE), (GROUP, 2 * GROUP - 1, CONTINUED)],
)
def test_a_mean_goes_on_inside_a_group_or_after_it(last, position, resumed):
    planner = planner_of(COLUMNS, 4)
    at = SiteRequest(Site("resid_post", 0), Positions.parse([last, position]), False)
    planner.add_capture("r", "reader", ResolvedSpec((at,), Postprocess("mean")), position + 1, None, 1)
    begun = step(planner, [("r", last + 1, 0)])
    assert begun.reductions[["resumed", "count", "done"]].tolist() == [(0, 1, 0)]
    rest = step(planner, [("r", position - last, last + 1)])
    assert rest.reductions[["resumed", "count", "done"]].tolist() == [(resumed, 2, 1)]
