"""Where interventions acted, as receipts say it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams

import vllm_weir as weir
from tests.unit.scored import D, Worker, admitted, opened
from vllm_weir.errors import WeirError
from vllm_weir.frontend.receive.row_store import RowStore
from vllm_weir.frontend.tracker import Tracker
from vllm_weir.results.receipt import InterventionReceipt
from vllm_weir.schema.instructions import NO_NORM

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


LAYERED = weir.Add({2: ONE, 0: 2 * ONE}, positions="prompt")


def dosed(sent, cached=0, reason="length"):
    """The view of a request that measures a zero vector, an addition by layer, and one to generated tokens.

    `sent`: (first position, cells of each position) that have arrived.
    """
    items = [weir.Add(NONE, "all"), LAYERED, weir.Add(ONE, 1, positions="generated")]
    asks = weir.params(SamplingParams(), interventions=items, dose=True).extra_args["weir"]
    store = RowStore()
    pending = opened(store, admitted([], asks=asks), IDS[:P])
    for k in range(len(pending.steered)):
        pending.steered[k] = np.ones(len(IDS), bool)
    worker = Worker(store)
    for first, cells in sent:
        worker.send(("r", first, cells), reported=3)
    return Tracker(pending, None, D, 0.1).view(IDS[P:], False, reason, cached)


PROMPT, GENERATED = [[1.0, 2.0, 9.0], [2.0, 4.0, 9.0], [6.0, NO_NORM, 9.0]], [[9.0, 9.0, k] for k in (0.25, 0.5, 1.5)]


def test_doses_are_means_over_the_rows_at_which_an_intervention_acted():
    view = dosed([(0, PROMPT), (3, GENERATED)])
    assert view.concluded()
    zero, layered, one = view.receipt().interventions
    assert zero == InterventionReceipt("add", "resid_post", (), 0)
    assert layered.layers == (0, 2) and layered.acted == 3
    by_layer = dict(zip(dosed([]).pending.admitted.effective[0].layers, [3.0]))
    other = 2 - next(iter(by_layer))
    assert layered.relative_dose_by_layer == {**by_layer, other: 3.0} and layered.relative_dose == 3.0
    assert (one.acted, one.relative_dose, one.relative_dose_by_layer) == (3, 0.75, {1: 0.75})


def test_cached_positions_are_not_measured():
    _, layered, one = dosed([(2, PROMPT[2:]), (3, GENERATED)], cached=2).receipt().interventions
    assert (
        layered.acted == 1 and layered.relative_dose == 6.0 and list(layered.relative_dose_by_layer.values()) == [6.0]
    )
    assert one.relative_dose == 0.75
    _, layered, _ = dosed([(3, GENERATED)], cached=3).receipt().interventions
    assert layered.acted == 0 and layered.relative_dose is None and layered.relative_dose_by_layer == {}


def test_doses_that_do_not_come_fail_the_receipt_unless_the_request_was_aborted():
    view = dosed([(0, PROMPT)])
    assert not view.concluded()
    with pytest.raises(WeirError, match=r"scores at 3 of 3 positions did not arrive within 0\.1 s"):
        view.receipt()
    aborted = dosed([(0, PROMPT), (3, GENERATED[:1])], reason="abort").receipt().interventions
    assert aborted[2].relative_dose == 0.25


def test_a_receipt_makes_the_round_trip_through_json():
    (one,) = receipts(weir.Add(ONE, "all"))
    assert one.to_dict() == {
        "op": "add", "hook": "resid_post", "layers": [0, 1, 2], "acted": 6, "relative_dose": None,
        "relative_dose_by_layer": {},
    }  # fmt: skip
    assert InterventionReceipt.from_dict(one.to_dict() | {"later": 1}) == one
