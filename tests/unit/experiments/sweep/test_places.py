"""Entries of the positions' axis, and their places in a pair of prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.refusals import refused
from vllm_weir.errors import WeirError
from vllm_weir.experiments.sweep.plan import Place, parse_entries, place_entries

IDS = [7, 3, 9, 3, 5, 1]


def placed(positions: Any, base: list[int] = IDS, source: list[int] | None = None) -> list[tuple[Any, Any]]:
    entries = parse_entries(positions)
    places = place_entries(entries, base, base if source is None else source, special_ids=[1])
    labels = range(len(places)) if entries is None else [entry.label for entry in entries]
    return list(zip(labels, places, strict=True))


@pytest.mark.parametrize(
    ("positions", "wanted"),
    [
        ("all", [(i, (i,)) for i in range(6)]),
        (2, [(2, (2,))]),
        ([0, -1], [(0, (0,)), (-1, (5,))]),
        (range(1, 3), [(1, (1,)), (2, (2,))]),
        (np.array([4, 1]), [(4, (4,)), (1, (1,))]),
        ("1:4", [("1:4", (1, 2, 3))]),
        (["last_prompt", [4, 2], "-2:"], [("last_prompt", (5,)), ("4,2", (2, 4)), ("-2:", (4, 5))]),
        ({"token_ids": [3]}, [('{"token_ids": [3]}', (1, 3))]),
        ([{"special": True}, "prompt"], [('{"special": true}', (5,)), ("prompt", (0, 1, 2, 3, 4, 5))]),
    ],
)
def test_entries(positions: Any, wanted: Any) -> None:
    assert placed(positions) == [(label, Place(at, at)) for label, at in wanted]


def test_prompts_that_differ_in_length() -> None:
    longer = [8, *IDS]
    assert placed([-1, "-2:"], IDS, longer) == [(-1, Place((5,), (6,))), ("-2:", Place((4, 5), (5, 6)))]
    assert placed({"token_ids": [9]}, IDS, longer)[0][1] == Place((2,), (3,))


@pytest.mark.parametrize(
    ("positions", "source", "field"),
    [
        ("all", [1, 2], "positions"),
        ([0, "1:"], [8, *IDS], "positions[1]"),
        ([0, 6], None, "positions[1]"),
        ([-7], None, "positions[0]"),
        ([[1, 9]], None, "positions[0]"),
        ("9:12", None, "positions"),
        ({"token_ids": [77]}, None, "positions"),
        ([], None, "positions"),
        ([3, 3], None, "positions[1]"),
        (["2:", "2:"], None, "positions[1]"),
        (["generated"], None, "positions[0]"),
        ([{"modality": "image"}], None, "positions[0]"),
        (["nowhere"], None, "positions[0]"),
        (2.5, None, "positions"),
        (None, None, "positions"),
    ],
)
def test_refused(positions: Any, source: Any, field: str) -> None:
    with refused(field):
        placed(positions, IDS, source)


@given(
    st.lists(
        st.one_of(st.integers(-6, 5), st.lists(st.integers(-6, 5), min_size=1, max_size=4)), min_size=1, max_size=5
    )
)
def test_positions_are_those_of_python(positions: list[Any]) -> None:
    try:
        found = placed(positions)
    except WeirError as error:
        assert "twice" in error.message
        return
    for item, (_, place) in zip(positions, found, strict=True):
        wanted = sorted({n % 6 for n in (item if isinstance(item, list) else [item])})
        assert list(place.base) == list(place.source) == wanted
