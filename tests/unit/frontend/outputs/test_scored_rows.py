"""What probes and gates said, on outputs: which rows, whoever asks, and how often interventions acted."""

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
from vllm_weir.results.scores import Scores
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.resolved_probes import ResolvedGate

IDS = [0, 1, 2, 1, 0, 2, 1]
"""Of tokens: three of the prompt, four generated."""
P, G = 3, 4


def cells(first, count, reported=1):
    """Cell k at position p is p + k / 10."""
    return [[p + k / 10 for k in range(reported)] for p in range(first, first + count)]


def tracked(probes, stops=(), timeout=0.2, held=False, **more):
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
    threading.Timer(0.05, lambda: worker.send(("r", 4, cells(4, 2)))).start()
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


ADD = weir.Add(torch.ones(D), layers=2)


def gated(*interventions, gate_of, factors, cached=0, reason="length"):
    """The view of a finished sequence; `factors` of one gate, by position."""
    asks = weir.params(SamplingParams(), interventions=list(interventions)).extra_args["weir"]
    pending, tracker, worker = tracked(
        [probe()], asks=asks, gates=(ResolvedGate(0, 0, 0.5),), gate_of=gate_of, timeout=0.1
    )
    for k in range(len(pending.steered)):
        pending.steered[k] = np.ones(P + G, bool)
    worker.send(("r", 0, [[0.0, factor] for factor in factors]), reported=2)
    return tracker.view(IDS[P:], False, reason, cached)


def test_a_receipt_says_how_often_each_gate_let_its_intervention_act():
    layers = weir.Add({0: torch.ones(D), 2: -torch.ones(D)}, positions="generated")
    zero = weir.Add(torch.zeros(D), layers=2)
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
    last = weir.Add(torch.ones(D), layers=2, positions="last_prompt")
    never = [0.0] * (P + G)
    assert gated(ADD, last, gate_of=(0, -1), factors=never).steered == 1
    assert gated(ADD, gate_of=(0,), factors=factors, cached=2).steered == 3


def test_factors_that_do_not_come_fail_the_request_unless_it_was_aborted():
    view = gated(ADD, gate_of=(0,), factors=[1, 1])
    assert not view.concluded()
    with pytest.raises(WeirError, match=r"scores at 4 of 6 positions did not arrive within 0\.1 s"):
        view.verify()
    (gate,) = gated(ADD, gate_of=(0,), factors=[1, 1], reason="abort").receipt().gates
    assert (gate["fired"], gate["of"]) == (2, 6)


def test_requests_without_gates_have_none_in_their_receipts():
    asks = weir.params(SamplingParams(), interventions=[ADD]).extra_args["weir"]
    pending, tracker, _ = tracked([], asks=asks)
    pending.steered[0] = np.ones(P + G, bool)
    assert tracker.view(IDS[P:], False, "length", 0).receipt().gates == (None,)
    assert tracked([])[1].view(IDS[P:], False, "length", 0).receipt().gates == ()
