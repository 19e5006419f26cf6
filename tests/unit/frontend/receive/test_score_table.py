"""Scores on their way in: filed by position, whoever waits, whatever is lost."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scored import Worker, admitted, opened, probe
from vllm_weir import WeirError, messages
from vllm_weir.frontend.receive import score_table
from vllm_weir.frontend.receive.row_store import RowStore
from vllm_weir.frontend.receive.score_table import ScoreSeries, ScoreTable


@given(runs=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=12))
def test_every_position_has_what_was_recorded_last(runs):
    table, truth = ScoreTable(2), {}
    for number, (first, count) in enumerate(runs):
        values = [[number, p] for p in range(first, first + count)]
        table.record(first, np.array(values, np.float32))
        truth |= dict(zip(range(first, first + count), values, strict=True))
    everywhere = np.arange(60)
    known = table.known(everywhere)
    assert known.tolist() == [p in truth for p in everywhere]
    assert table.take(everywhere[known]).tolist() == [truth[p] for p in everywhere[known]]
    assert [None if (row := table.row(p)) is None else row.tolist() for p in everywhere] == [
        *map(truth.get, everywhere)
    ]


def test_scores_of_several_requests_come_in_one_message():
    """Two workers may use the same numbers for them."""
    store = RowStore()
    a, b, c = (opened(store, admitted([probe()]), name=name) for name in "abc")
    worker = Worker(store)
    worker.send(("a", 0, [1, 2, 3]), ("gone", 5, [8, 8]), ("b", 2, [4]))
    Worker(store, "other").send(("c", 0, [9]))
    worker.send(("b", 3, [5]), ("a", 3, [6]))
    assert a.scores.take(np.arange(4)).ravel().tolist() == [1, 2, 3, 6] and c.scores.row(0) == [9]
    assert b.scores.take(np.array([2, 3])).ravel().tolist() == [4, 5]
    assert not b.scores.known(np.array([0, 1])).any()
    worker.reopen("a")
    worker.send(("a", 1, [7, 7]))
    assert a.scores.take(np.arange(4)).ravel().tolist() == [1, 7, 7, 6], "after a preemption"


@pytest.mark.parametrize(
    ("scored", "scores"),
    [([(9, 0, 1)], [1.0]), ([(1, 0, 2)], [1.0]), ([(1, -1, 1)], [1.0])],
    ids=["not opened", "too few", "before the start"],
)
def test_a_message_that_does_not_fit_is_an_error(scored, scores):
    series = ScoreSeries()
    series.open("w", messages.SeriesOpened(1, "r", 1), ScoreTable(1))
    with pytest.raises(ValueError, match="scores of series"):
        series.record("w", np.array(scored, np.int32).tobytes(), np.array(scores, np.float32).tobytes())


def test_series_of_requests_that_have_gone_are_forgotten(monkeypatch):
    monkeypatch.setattr(score_table, "KEPT", 8)
    series = ScoreSeries()
    series._prune_above = 16
    table = ScoreTable(1)
    for number in range(500):
        series.open("w", messages.SeriesOpened(number, "r", 1), table if number == 3 else None)
        assert len(series) <= 18
    runs = np.array([(3, 0, 1), (499, 0, 1)], np.int32).tobytes()
    series.record("w", runs, np.array([5, 6], np.float32).tobytes())
    assert table.row(0) == [5]


def test_whoever_waits_gets_the_scores_or_hears_why_not():
    store = RowStore()
    pending, worker = opened(store, admitted([probe()])), Worker(store)
    worker.send(("r", 0, [1, 2]))
    pending.await_scores(np.array([0, 1]), 0.0)
    with pytest.raises(WeirError, match=r"1 of 3 positions did not arrive within 0.01 s \(first missing position 2\)"):
        pending.await_scores(np.arange(3), 0.01)
    late = threading.Timer(0.01, lambda: worker.send(("r", 2, [3])))
    late.start()
    pending.await_scores(np.arange(3), 30.0)
    late = threading.Timer(0.01, lambda: worker.send(failures={"r": "it broke"}))
    late.start()
    with pytest.raises(WeirError, match="it broke"):
        pending.await_scores(np.arange(4), 30.0)


def test_a_request_that_was_released_keeps_no_scores():
    store = RowStore()
    pending, worker = opened(store, admitted([probe()])), Worker(store)
    worker.send(("r", 0, [1, 2]))
    store.forget(pending)
    worker.send(("r", 2, [3]))
    assert pending.scores.row(0) is None and pending.scores.row(2) is None
    with pytest.raises(WeirError, match="released"):
        pending.await_scores(np.arange(2), 1.0)
