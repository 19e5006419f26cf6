"""Outputs that wait for the scores of their tokens: none too early, none too many, none lost."""

from __future__ import annotations

import gc
import itertools
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scored import Worker, admitted, opened, probe, rule
from vllm_weir.frontend.outputs.held_outputs import COMPARE, FAILED, HeldOutputs, OutputHolder, Release
from vllm_weir.frontend.receive.row_store import RowStore

P = 3
RULES = (rule(),)
POSITIONS = ("all", "generated", "prompt", "4:", "::2", [4, 6], {"token_ids": [1]})


def made(stops=RULES, positions="all", prompt=range(P), store=None):
    pending = opened(store or RowStore(), admitted([probe(positions=positions)], stops), prompt)
    return HeldOutputs(pending, stops)


def score(held, first, *values):
    """The scores of generated tokens from `first` on arrive."""
    held.pending.scores.record(P + first, np.array(values, np.float32)[:, None])


def test_a_token_goes_out_with_the_step_that_scores_it():
    held = made()
    held.add("a", [7], False)
    assert held.release() == [] and not held.behind, "nothing is on its way yet"
    held.add("b", [8], False)
    assert held.release() == [] and held.behind and held.awaited == P
    score(held, 0, 0.1)
    assert held.release() == [Release("a", 1)] and not held.behind and held.judged == 1
    held.add("c", [9], True)
    score(held, 1, 0.2)
    assert held.release() == [Release("b", 1), Release("c", 1)], "the last one has no score"
    assert held.judged == 2 and held.ends_at is None and held.release() == []


def test_a_token_whose_score_says_so_is_the_last():
    held = made()
    held.add("a", [7], False)
    held.add("b", [8], False)
    score(held, 0, 0.1)
    assert held.release() == [Release("a", 1)]
    held.add("c", [9], False)
    score(held, 1, 0.9)
    assert held.release() == [Release("b", 1)]
    assert (held.ends_at, held.stop_reason, held.judged) == (2, "probe:p", 2)
    held.add("d", [9], True)
    score(held, 2, 0.9)
    assert held.release() == [] and not held.behind


def test_several_tokens_in_one_output_are_cut_after_the_one_that_ends():
    held = made()
    held.add("a", [1, 2, 3, 4], False)
    score(held, 0, 0.1, 0.9, 0.1)
    assert held.release() == [Release("a", 2, cut=True)] and held.ends_at == 2
    whole = made()
    whole.add("a", [1, 2], False)
    score(whole, 0, 0.1)
    whole.add("b", [3], False)
    score(whole, 1, 0.9)
    assert whole.release() == [Release("a", 2)]


def test_the_first_rule_that_holds_names_the_reason():
    probes, stops = [probe("p", outputs=2), probe("q")], [rule("p", "<=", -1.0, 0, 1), rule("q", ">=", 0.1, 1)]
    held = HeldOutputs(opened(RowStore(), admitted(probes, stops)), stops)
    held.add("a", [7], False)
    held.add("b", [8], False)
    held.pending.scores.record(P, np.array([[5.0, -1.0, 0.1]], np.float32))
    held.release()
    assert held.stop_reason == "probe:p"


@pytest.mark.parametrize(
    ("stops", "value", "ends_at"),
    [
        ([rule(op=">=", threshold=0.9)], 0.9, 1),  # as float64 the score is less
        ([rule(op=op) for op in COMPARE], float("nan"), None),
    ],
)
def test_thresholds_are_compared_in_float32_and_not_a_number_ends_nothing(stops, value, ends_at):
    held = made(stops)
    held.add("a", [7], False)
    held.add("b", [8], False)
    score(held, 0, value)
    assert held.release() == [Release("a", 1)] and held.ends_at == ends_at


@given(
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    ends=st.booleans(),
    positions=st.sampled_from(POSITIONS),
    has_rule=st.booleans(),
    data=st.data(),
)
def test_whenever_outputs_and_scores_come_the_same_tokens_go_out(sizes, ends, positions, has_rule, data):
    """Against a reading of the whole sequence afterwards; scores lag behind outputs by anything.

    An abort in the engine is an output without a token, which needs no score.
    """
    total = sum(sizes)
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=total, max_size=total))
    scores = data.draw(st.lists(st.sampled_from([0.0, 0.2, 0.9]), min_size=total, max_size=total))
    stops = (rule(),) if has_rule else ()
    held = made(stops, positions)
    out, sent, seen = [], 0, 0
    selector = held.pending.admitted.probes[0].positions
    chosen = selector.mask(np.arange(P, P + total), P, np.array(tokens, int))

    def look():
        for one in held.release():
            first = one.output
            for j in range(first, first + one.tokens):
                is_known = j < sent or (not chosen[j] and j < seen - 1)
                assert is_known or (ends and finished and j == total - 1), "too early"
            out.extend(tokens[first : first + one.tokens])

    def arrive(until):
        nonlocal sent
        if until > sent:
            score(held, sent, *scores[sent:until])
            sent = until
        look()

    finished = False
    for k, size in enumerate(sizes):
        finished = k == len(sizes) - 1
        held.add(seen, tokens[seen : seen + size], ends and finished)
        seen += size
        look()
        arrive(data.draw(st.integers(sent, max(sent, seen - 1))))
    arrive(total - 1)
    fired = [j for j in range(total - 1) if has_rule and chosen[j] and scores[j] > 0.5]
    if fired:
        assert out == tokens[: fired[0] + 1] and held.ends_at == len(out)
    elif ends:
        assert out == tokens and held.ends_at is None
    else:
        complete = [end for end in itertools.accumulate(sizes) if end < max(total, 1)]
        assert out == tokens[: max(complete, default=0)] and held.ends_at is None


def holder(timeout=30.0):
    store = RowStore()
    return store, OutputHolder(store, timeout), Worker(store)


def sequence(store, holding, name, stops=RULES):
    held = holding.open(opened(store, admitted([probe()], stops), range(P), name))
    held.add(f"{name}0", [1], False)
    held.add(f"{name}1", [2], False)
    return held


def test_one_sequence_does_not_wait_for_another():
    store, holding, worker = holder()
    a, b = (sequence(store, holding, name) for name in "ab")
    worker.send(("b", P, [0.1]))
    assert holding.release([a, b]) == [Release("b0", 1)] and holding.behind
    pauses = [holding.pause for _ in range(9)]
    assert pauses == sorted(pauses) and pauses[0] < 0.001 and pauses[-1] == 0.02
    worker.send(("a", P, [0.1]))
    assert holding.release() == [Release("a0", 1)] and not holding.behind and holding.pause is None


def test_scores_that_never_come_fail_their_request_alone():
    store, holding, worker = holder(0.02)
    a, b = (sequence(store, holding, name) for name in "ab")
    assert holding.release([a, b]) == []
    worker.send(("b", P, [0.1]))
    assert holding.release() == [Release("b0", 1)]
    time.sleep(0.03)
    assert holding.release() == [Release("a0", 1)] and not holding.behind
    assert a.stop_reason == FAILED and a.ends_at == 1
    assert "the scores at position 3 did not arrive within 0.02 s" in a.pending.failure
    assert b.pending.failure is None


def test_a_failed_request_ends_at_once():
    store, holding, worker = holder()
    held = sequence(store, holding, "a")
    assert holding.release([held]) == []
    worker.send(failures={"a": "it broke"})
    assert holding.release() == [Release("a0", 1)] and held.stop_reason == FAILED
    held.add("a2", [3], True)
    assert holding.release([held]) == []


def test_waiting_ends_with_the_scores_a_failure_or_the_timeout():
    store, holding, worker = holder()
    a, b = (sequence(store, holding, name) for name in "ab")
    threading.Timer(0.01, lambda: worker.send(("a", P, [0.9]))).start()
    threading.Timer(0.02, lambda: worker.send(failures={"b": "it broke"})).start()
    holding.wait([a, b])
    assert {one.output for one in holding.release([a, b])} == {"a0", "b0"} and a.stop_reason == "probe:p"
    store, holding, worker = holder(0.05)
    a = sequence(store, holding, "a")
    holding.wait([a])
    assert holding.release([a], expired=True) == [Release("a0", 1)] and "did not arrive" in a.pending.failure


def test_whoever_drops_a_sequence_drops_its_outputs():
    store, holding, _ = holder()
    held = sequence(store, holding, "a")
    assert holding.release([held]) == [] and holding.behind and len(holding) == 1
    assert holding.find("a") is held
    del held
    gc.collect()
    assert not holding.behind and not len(holding) and holding.find("a") is None and holding.release() == []
