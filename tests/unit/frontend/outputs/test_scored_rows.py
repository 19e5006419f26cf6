"""What outputs say of probes and interventions: scores and their rows, and receipts of gates, places and doses."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

import vllm_weir as weir
from tests.unit.scored import D, Worker, admitted, opened, probe, rule
from vllm_weir import Site, WeirError
from vllm_weir.frontend.outputs.held_outputs import HeldOutputs
from vllm_weir.frontend.receive.row_store import RowStore
from vllm_weir.frontend.tracker import Tracker
from vllm_weir.guard.outputs import VIEW
from vllm_weir.results.receipt import InterventionReceipt
from vllm_weir.results.scores import Scores
from vllm_weir.schema.instructions import NO_NORM
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.resolved_probes import ResolvedGate

IDS = [0, 1, 2, 1, 0, 2, 1]
"""Of tokens: three of the prompt, four generated."""
P, G = 3, 4


def cells(first, count, reported=1):
    """Cell k at position p is p + k / 10."""
    return [[p + k / 10 for k in range(reported)] for p in range(first, first + count)]


def tracked(probes, stops=(), timeout=0.05, held=False, **more):
    store = RowStore()
    pending = opened(store, admitted(probes, stops, **more), IDS[:P])
    return (
        pending,
        Tracker(pending, None, D, timeout, held=HeldOutputs(pending, stops) if held else None),
        Worker(store),
    )


@given(
    selector=st.sampled_from(["all", "prompt", "generated", "last_prompt", "sampled", "1::2", [0, 4, 9]])
    | st.lists(st.integers(0, 2), min_size=1).map(lambda ids: {"token_ids": ids}),
    generated=st.integers(1, G),
)
def test_rows_are_those_that_the_selector_chooses(selector, generated):
    _, tracker, worker = tracked([probe("a", selector, 2), probe("b")])
    worker.send(("r", 0, cells(0, P + G, 3)), reported=3)
    scores = tracker.view(IDS[P : P + generated], False, "length", 0).scores()
    end = P + generated - 1
    chosen = [p for p in range(end) if Positions.parse(selector).mask(np.array([p]), P, np.array(IDS[p : p + 1]))[0]]
    assert list(scores) == ["a", "b"] and scores.rows == len(chosen) + end
    assert scores.positions["a"].tolist() == chosen and scores.positions["b"].tolist() == list(range(end))
    assert scores["a"].dtype == torch.float32 and scores["a"].shape == (len(chosen), 2)
    torch.testing.assert_close(scores["a"], torch.tensor([[p, p + 0.1] for p in chosen]).reshape(-1, 2))
    torch.testing.assert_close(scores["b"], torch.tensor([[p + 0.2] for p in range(end)]))


def test_rows_of_a_stream_come_once():
    _, tracker, worker = tracked([probe()])
    worker.send(("r", 0, cells(0, P + G)))
    views = [tracker.view(IDS[P : P + n], True, "length" if n == G else None, 0) for n in range(1, G + 1)]
    assert [view.scores().positions["p"].tolist() for view in views] == [[0, 1, 2], [3], [4], [5]]
    views[0].extend(views[1])
    assert views[0].scores().positions["p"].tolist() == [0, 1, 2, 3]
    whole = views[3].with_start(0)
    assert whole.scores().positions["p"].tolist() == list(range(P + G - 1))


def test_a_token_that_was_held_back_has_its_own_score():
    _, tracker, worker = tracked([probe(positions="generated")], [rule(threshold=5.5)], held=True)
    held, out = tracker.held, []
    for n in range(1, G + 1):
        held.add(n, [IDS[P + n - 1]], False)
        worker.send(("r", P + n - 2, cells(P + n - 2, 1)))
        for one in held.release():
            reason = None if held.ends_at is None else "stop"
            out.append(tracker.view(IDS[P : P + one.output], True, reason, 0))
    assert [view.scores().positions["p"].tolist() for view in out] == [[3], [4], [5]]
    assert [view.end for view in out] == [P, P + 1, P + 2] and not held.behind
    worker.send(("r", P + G - 1, cells(P + G - 1, 1)))
    assert held.release() == [], "the engine has not said so yet"
    held.add("later", [0], False)
    (last,) = held.release()
    view = tracker.view(IDS[P : P + last.output], True, "stop", 0)
    assert held.stop_reason == "probe:p" and view.scores()["p"].tolist() == [[6.0]]


def test_what_is_missing_is_waited_for_and_an_abort_takes_what_there_is():
    _, tracker, worker = tracked([probe()], timeout=30.0)
    view = tracker.view(IDS[P:], False, "length", 0)
    worker.send(("r", 0, cells(0, 4)))
    assert not view.concluded()
    threading.Timer(0.01, lambda: worker.send(("r", 4, cells(4, 2)))).start()
    assert len(view.scores()["p"]) == P + G - 1 and view.concluded()
    pending, tracker, worker = tracked([probe()])
    worker.send(("r", 1, cells(1, 2)))
    assert tracker.view(IDS[P:], False, "abort", 0).scores().positions["p"].tolist() == [1, 2]
    with pytest.raises(WeirError, match="scores at 4 of 6 positions did not arrive"):
        tracker.view(IDS[P:], False, "length", 0).scores()
    pending.failure = "it broke"
    with pytest.raises(WeirError, match="it broke"):
        tracker.view(IDS[P:], False, "length", 0).scores()


def completion(view, index=0):
    made = CompletionOutput(index, "text", IDS[P:], None, None)
    setattr(made, VIEW, view)
    return made


def test_outputs_have_scores_wherever_they_are_read():
    _, tracker, worker = tracked([probe(outputs=2)])
    worker.send(("r", 0, cells(0, P + G, 2)), reported=2)
    one = completion(tracker.view(IDS[P:], False, "length", 0))
    out = RequestOutput("r", None, IDS[:P], None, [one], True)
    assert out.scores is one.scores and list(out.scores) == ["p"]
    with pytest.raises(KeyError, match="no probe 'q' scored this request; probes: p"):
        out.scores["q"]
    for copied in (pickle.loads(pickle.dumps(out)), copy.deepcopy(out)):  # noqa: S301
        assert copied.scores["p"].equal(out.scores["p"])
        assert copied.scores.positions["p"].equal(out.scores.positions["p"])
    assert repr(out.scores) == "Scores(p: [6, 2])"
    assert completion(tracked([])[1].view(IDS[P:], False, "length", 0)).scores is None
    assert CompletionOutput(0, "text", [], None, None).scores is None


def test_a_pickle_has_no_more_than_its_own_rows():
    memory = torch.zeros(10_000, 1)
    scores = Scores({"p": memory[:2]}, {"p": torch.arange(10_000)[:2]})
    assert len(pickle.dumps(scores)) < 2_000


ONE, NONE = torch.ones(D), torch.zeros(D)
ADD = weir.Add(ONE, layers=2)


def finished(*interventions, probes=(), generated=G, cached=0, reason="length", sent=(), reported=2, **more):
    """The view of a finished sequence that was steered everywhere; `sent`: (first position, cells) that arrived."""
    asks = weir.params(SamplingParams(), interventions=list(interventions), dose=more.pop("dose", None))
    pending, tracker, worker = tracked(list(probes), asks=asks.extra_args["weir"] if interventions else None, **more)
    for k in range(len(pending.steered)):
        pending.steered[k] = np.ones(P + G, bool)
    for first, scores in sent:
        worker.send(("r", first, scores), reported=reported)
    return tracker.view(IDS[P : P + generated], False, reason, cached)


def receipts(*interventions, **more) -> tuple[InterventionReceipt, ...]:
    return finished(*interventions, **more).receipt().interventions


def gated(*interventions, gate_of, factors, **more):
    """The view of a finished sequence; `factors` of one gate, by position."""
    sent = [(0, [[0.0, factor] for factor in factors])]
    return finished(
        *interventions, probes=[probe()], gates=(ResolvedGate(0, 0, 0.5),), gate_of=gate_of, sent=sent, **more
    )


def test_a_receipt_says_how_often_each_gate_let_its_intervention_act():
    layers = weir.Add({0: ONE, 2: -ONE}, positions="generated")
    zero = weir.Add(NONE, layers=2)
    factors = [0, 1, 0.5, 1, 0, 0.25, 1]
    view = gated(ADD, ADD, layers, zero, gate_of=(-1, 0, 0, 0), factors=factors)
    receipt = view.receipt()
    assert receipt.gates == (
        None,
        {"probe": "p", "fired": 4, "of": 6, "spans": [[1, 4], [5, 6]]},
        {"probe": "p", "fired": 2, "of": 3, "spans": [[3, 4], [5, 6]]},
        {"probe": "p", "fired": 0, "of": 0, "spans": []},
    )
    site = lambda layer: Site("resid_post", layer)
    assert receipt.steered == ({site(2): 6}, {site(2): 4}, {site(0): 2, site(2): 2}, {})
    assert [(one.op, one.layers, one.acted) for one in receipt.interventions] == [
        ("add", (2,), 6), ("add", (2,), 4), ("add", (0, 2), 2), ("add", (), 0),
    ]  # fmt: skip
    assert receipt.to_dict()["gates"] == list(receipt.gates)
    assert pickle.loads(pickle.dumps(view)).receipt() == receipt  # noqa: S301


def test_positions_changed_count_once_and_only_where_a_gate_was_open():
    factors = [0, 1, 0.5, 1, 0, 0.25, 1]
    assert gated(ADD, ADD, gate_of=(0, 0), factors=factors).steered == 4
    last = weir.Add(ONE, layers=2, positions="last_prompt")
    never = [0.0] * (P + G)
    assert gated(ADD, last, gate_of=(0, -1), factors=never).steered == 1
    assert gated(ADD, gate_of=(0,), factors=factors, cached=2).steered == 3


def test_factors_that_do_not_come_fail_the_request_unless_it_was_aborted():
    view = gated(ADD, gate_of=(0,), factors=[1, 1])
    assert not view.concluded()
    with pytest.raises(WeirError, match=r"scores at 4 of 6 positions did not arrive within 0\.05 s"):
        view.verify()
    (gate,) = gated(ADD, gate_of=(0,), factors=[1, 1], reason="abort").receipt().gates
    assert (gate["fired"], gate["of"]) == (2, 6)


def test_requests_without_gates_have_none_in_their_receipts():
    assert finished(ADD).receipt().gates == (None,) and finished().receipt().gates == ()


# --- where interventions acted, and their doses


@pytest.mark.parametrize(
    ("positions", "acted"),
    [("all", 6), ("prompt", 3), ("generated", 3), ("last_prompt", 1), ("4:", 2), ([0, 5, 9], 2),
     ({"token_ids": [2]}, 2)],
)  # fmt: skip
def test_positions_count_once_whatever_the_number_of_layers(positions, acted):
    one, several = receipts(weir.Add(ONE, 1, positions=positions), weir.Add(ONE, "all", positions=positions))
    assert one == InterventionReceipt("add", "resid_post", (1,), acted)
    assert several == InterventionReceipt("add", "resid_post", (0, 1, 2), acted)


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


def test_a_position_that_is_changed_at_any_block_counts_where_it_was_computed():
    rows = {0: torch.stack([ONE, NONE, NONE]), 2: torch.stack([NONE, NONE, ONE])}
    assert receipts(weir.Add(rows, positions=[0, 1, 5])) == (InterventionReceipt("add", "resid_post", (0, 2), 2),)
    for items, more, acted in (
        ([weir.Add(rows, positions=[0, 1, 5])], {"cached": 1}, [1]),
        ([weir.Add(ONE, 1)], {"cached": 2}, [4]),
        ([weir.Add(ONE, 1, positions="generated")], {"generated": 1}, [0]),
        ([], {}, []),
    ):
        assert [one.acted for one in receipts(*items, **more)] == acted


def test_a_receipt_has_one_entry_for_each_intervention():
    """Whatever it is carried out as; of what came from the cache, each position counts once."""
    rows = {0: torch.stack([ONE, NONE, ONE]), 2: torch.stack([NONE, 2 * ONE, ONE])}
    items = [
        weir.Add({0: ONE, 1: 2 * ONE, 2: NONE}),
        weir.Add(torch.zeros(3, D), per_layer=True),
        weir.Add(rows, positions=[0, 1, 4]),
        weir.Ablate(ONE, "all", positions="generated"),
    ]
    view = finished(*items, cached=2)
    assert [len(one.moves) for one in view.pending.admitted.interventions] == [2, 0, 2, 1]
    receipt, site = view.receipt(), lambda layer: Site("resid_post", layer)
    assert receipt.steered == (
        {site(0): 4, site(1): 4}, {}, {site(0): 1, site(2): 1}, {site(0): 3, site(1): 3, site(2): 3},
    )  # fmt: skip
    assert receipt.shared == (2, 0, 2, 0)
    assert receipt.interventions == (
        InterventionReceipt("add", "resid_post", (0, 1), 4),
        InterventionReceipt("add", "resid_post", (), 0),
        InterventionReceipt("add", "resid_post", (0, 2), 1),
        InterventionReceipt("ablate", "resid_post", (0, 1, 2), 3),
    )


LAYERED = weir.Add({2: ONE, 0: 2 * ONE}, positions="prompt")


def dosed(*sent, **more):
    """The view of a request that measures a zero vector, an addition by layer, and one to generated tokens."""
    items = [weir.Add(NONE, "all"), LAYERED, weir.Add(ONE, 1, positions="generated")]
    return finished(*items, dose=True, sent=sent, reported=3, **more)


PROMPT, GENERATED = [[1.0, 2.0, 9.0], [2.0, 4.0, 9.0], [6.0, NO_NORM, 9.0]], [[9.0, 9.0, k] for k in (0.25, 0.5, 1.5)]


def test_doses_are_means_over_the_rows_at_which_an_intervention_acted():
    view = dosed((0, PROMPT), (3, GENERATED))
    assert view.concluded()
    zero, layered, one = view.receipt().interventions
    assert zero == InterventionReceipt("add", "resid_post", (), 0)
    assert layered.layers == (0, 2) and layered.acted == 3
    by_layer = dict(zip(dosed().pending.admitted.effective[0].layers, [3.0]))
    other = 2 - next(iter(by_layer))
    assert layered.relative_dose_by_layer == {**by_layer, other: 3.0} and layered.relative_dose == 3.0
    assert (one.acted, one.relative_dose, one.relative_dose_by_layer) == (3, 0.75, {1: 0.75})


def test_cached_positions_are_not_measured():
    _, layered, one = dosed((2, PROMPT[2:]), (3, GENERATED), cached=2).receipt().interventions
    assert (layered.acted, layered.relative_dose, one.relative_dose) == (1, 6.0, 0.75)
    assert list(layered.relative_dose_by_layer.values()) == [6.0]
    _, layered, _ = dosed((3, GENERATED), cached=3).receipt().interventions
    assert layered.acted == 0 and layered.relative_dose is None and layered.relative_dose_by_layer == {}


def test_doses_that_do_not_come_fail_the_receipt_unless_the_request_was_aborted():
    view = dosed((0, PROMPT))
    assert not view.concluded()
    with pytest.raises(WeirError, match=r"scores at 3 of 3 positions did not arrive within 0\.05 s"):
        view.receipt()
    aborted = dosed((0, PROMPT), (3, GENERATED[:1]), reason="abort").receipt().interventions
    assert aborted[2].relative_dose == 0.25
