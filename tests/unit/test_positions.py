"""Selectors against the naive reading in tests.support.check."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.check import expected_positions
from tests.unit.wishes import selectors
from vllm_weir import Capture, WeirError
from vllm_weir.spec.positions import MAX_LIST, Positions

MANY = settings(max_examples=1000, deadline=None)
lengths = st.integers(1, 60)
grown = st.integers(1, 30)


@MANY
@given(selector=selectors(), P=lengths, G=grown, data=st.data())
def test_mask_equals_the_naive_reading(selector, P, G, data):
    ids = data.draw(st.lists(st.integers(0, 20), min_size=P + G, max_size=P + G))
    rows = P + G - 1
    mask = Positions.parse(selector).mask(np.arange(rows), P, np.asarray(ids[:rows]))
    assert mask.dtype == bool and np.flatnonzero(mask).tolist() == expected_positions(selector, P, G, ids)


@MANY
@given(selector=selectors(), P=lengths, low=st.integers(0, 80), n=st.integers(0, 40))
def test_mask_of_a_window_is_the_window_of_the_mask(selector, P, low, n):
    parsed = Positions.parse(selector)
    whole = parsed.mask(np.arange(low + n), P, np.arange(low + n) % 21)
    part = parsed.mask(np.arange(low, low + n), P, np.arange(low, low + n) % 21)
    assert part.tolist() == whole[low:].tolist()


@MANY
@given(selector=selectors(), P=lengths, G=grown, data=st.data())
def test_first_never_passes_a_wanted_position(selector, P, G, data):
    ids = data.draw(st.lists(st.integers(0, 20), min_size=P + G, max_size=P + G))
    first = Positions.parse(selector).first(P, ids[:P])
    wanted = expected_positions(selector, P, G, ids)
    assert not wanted or (first is not None and first <= wanted[0])
    assert first is None or first >= 0
    in_prompt = [p for p in wanted if p < P]
    exact = not (isinstance(selector, dict) or (isinstance(selector, str) and ":" in selector))
    if in_prompt and (exact or isinstance(selector, dict)):
        assert first == in_prompt[0], "a hit is capped earlier than need be"
    if isinstance(selector, dict) and selector["token_ids"]:
        assert Positions.parse(selector).first(P, None) == 0


@MANY
@given(selector=selectors(), P=lengths)
def test_json_round_trip(selector, P):
    parsed = Positions.parse(selector)
    again = Positions.parse(json.loads(json.dumps(parsed.to_json())))
    at, ids = np.arange(90), np.arange(90) % 21
    assert again.mask(at, P, ids).tolist() == parsed.mask(at, P, ids).tolist()
    assert Positions.parse(parsed) is parsed


def test_unknown_tokens_select_a_superset():
    parsed = Positions.parse({"token_ids": [3]})
    assert parsed.mask(np.arange(5), 3, None).all() and parsed.needs_token_ids


@pytest.mark.parametrize(
    "same",
    [range(2, 9), (2, 3, 4, 5, 6, 7, 8), np.arange(2, 9), torch.arange(2, 9), [np.int64(i) for i in range(2, 9)]],
)
def test_other_sequences_of_ints(same):
    assert Positions.parse(same) == Positions.parse(list(range(2, 9)))
    assert Capture(layers=same).layers == tuple(range(2, 9))
    assert Positions.parse({"token_ids": same}) == Positions.parse({"token_ids": list(range(2, 9))})


@pytest.mark.parametrize(
    "bad",
    [
        None,
        True,
        1.0,
        float("nan"),
        {1},
        {},
        {"a": 1},
        "1",
        "a:b",
        "1:2:3:4",
        "1:2\n",
        [None],
        [2**31],
        np.zeros((2, 2)),
        torch.zeros(2),
    ],
)
def test_refusals(bad):
    with pytest.raises(WeirError) as e:
        Positions.parse(bad, "there")
    assert e.value.field.startswith("there")


def test_long_lists_are_refused():
    Positions.parse(range(MAX_LIST))
    with pytest.raises(WeirError, match="slice"):
        Positions.parse(range(10**9))


@pytest.mark.parametrize(
    ("selector", "P", "count"),
    [
        *[(s, None, None) for s in ("all", "prompt", "generated", "sampled", "4:", "-2:", ":-1", "2:-1", [], "5:2")],
        *[("last_prompt", None, 1), (-1, None, 1), ([5, 5, 3], None, 2), ("1:8:3", None, 3), ("-3:-1", None, 2)],
        *[([3, -1], None, 2), ([3, -1], 4, 1), ([3, -1], 9, 2), ([-9, 2], 8, 1), (-9, 8, None), ([99, 1], 8, 2)],
    ],
)
def test_how_many_positions_a_selector_names(selector, P, count):
    assert Positions.parse(selector).count(P) == count


@pytest.mark.parametrize(("P", "G"), [(1, 1), (5, 3), (16, 1)])
@pytest.mark.parametrize("selector", ["all", "prompt", "generated", "sampled", "4:", "-2:", ":-1", "2:-1", "::2", "1:"])
def test_how_many_positions_a_request_can_reach(selector, P, G):
    """What is bounded by the request alone: as many as its mask has of all positions with rows."""
    positions, end = Positions.parse(selector), P + G - 1
    assert (positions.count(P, end) or 0) == int(positions.mask(np.arange(end), P).sum())


@settings(max_examples=500, deadline=None)
@given(selector=selectors(), P=st.integers(1, 40))
def test_rank_and_steady_are_what_the_mask_says(selector, P):
    chosen = Positions.parse(selector)
    every = np.arange(200)
    mask = chosen.mask(every, P)
    if not chosen.needs_token_ids:
        for rank, position in enumerate(np.flatnonzero(mask)):
            assert chosen.rank(int(position), P) == rank
    steady = chosen.steady(P)
    if steady is None:
        assert chosen.kind == "slice" and chosen.values[2] not in (None, 1)
    else:
        start, selected = steady
        assert (mask[max(0, start) :] == selected).all() or chosen.needs_token_ids
