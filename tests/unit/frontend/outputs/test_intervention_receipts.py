"""Where interventions acted, as receipts say it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams

import vllm_weir as weir
from tests.unit.scored import D, admitted, opened
from vllm_weir.frontend.receive.row_store import RowStore
from vllm_weir.frontend.tracker import Tracker
from vllm_weir.results.receipt import InterventionReceipt

IDS = [0, 1, 2, 1, 0, 2, 1]
"""Of tokens: three of the prompt, four generated, the last of which has no row."""
P = 3
ONE, NONE = torch.ones(D), torch.zeros(D)


def receipts(*interventions, cached=0, reason="length", generated=4) -> tuple[InterventionReceipt, ...]:
    asks = weir.params(SamplingParams(), interventions=list(interventions)).extra_args["weir"]
    pending = opened(RowStore(), admitted([], asks=asks), IDS[:P])
    for k in range(len(pending.steered)):
        pending.steered[k] = np.ones(len(IDS), bool)
    view = Tracker(pending, None, D, 0.2).view(IDS[P : P + generated], False, reason, cached)
    return view.receipt().interventions


@pytest.mark.parametrize(
    ("positions", "acted"),
    [
        ("all", 6),
        ("prompt", 3),
        ("generated", 3),
        ("last_prompt", 1),
        ("4:", 2),
        ([0, 5, 9], 2),
        ({"token_ids": [2]}, 2),
    ],
)
def test_positions_count_once_whatever_the_number_of_layers(positions, acted):
    one, several = receipts(weir.Add(ONE, 1, positions=positions), weir.Add(ONE, "all", positions=positions))
    assert one == InterventionReceipt("add", "resid_post", (1,), acted)
    assert several == InterventionReceipt("add", "resid_post", (0, 1, 2), acted)


def test_a_span_that_holds_no_position_gives_0():
    (one,) = receipts(weir.Add(ONE, 1, positions="generated"), generated=1)
    assert one.acted == 0


@pytest.mark.parametrize(("cached", "acted"), [(0, 6), (2, 4)])
def test_positions_from_the_prefix_cache_count_where_they_were_computed(cached, acted):
    assert receipts(weir.Add(ONE, 1), cached=cached)[0].acted == acted


def test_each_kind_has_its_name_and_its_hook_point():
    done = receipts(
        weir.Add(ONE, 0),
        weir.Ablate(ONE, "all", hook="resid_pre"),
        weir.Clamp(ONE, 1, value=2.0),
        weir.Replace(ONE, 2, hook="mlp_out"),
        weir.LowRank(ONE[None], ONE[None], ONE[:1], 1),
    )
    assert [(one.op, one.hook, one.layers) for one in done] == [
        ("add", "resid_post", (0,)),
        ("ablate", "resid_pre", (0, 1, 2)),
        ("clamp", "resid_post", (1,)),
        ("replace", "mlp_out", (2,)),
        ("low_rank", "resid_post", (1,)),
    ]


def test_a_position_that_is_changed_at_any_block_counts():
    rows = {0: torch.stack([ONE, NONE, NONE]), 2: torch.stack([NONE, NONE, ONE])}
    assert receipts(weir.Add(rows, positions=[0, 1, 5])) == (InterventionReceipt("add", "resid_post", (0, 2), 2),)
    assert receipts(weir.Add(rows, positions=[0, 1, 5]), cached=1)[0].acted == 1


def test_what_changes_nothing_has_no_layers():
    assert receipts(weir.Add(NONE, "all")) == (InterventionReceipt("add", "resid_post", (), 0),)


def test_requests_without_interventions_have_none():
    assert receipts() == ()


def test_a_receipt_makes_the_round_trip_through_json():
    (one,) = receipts(weir.Add(ONE, "all"))
    assert one.to_dict() == {"op": "add", "hook": "resid_post", "layers": [0, 1, 2], "acted": 6}
    assert InterventionReceipt.from_dict(one.to_dict() | {"later": 1}) == one
