"""The naive position reference is itself checked, against cases worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.check import expected_positions

P, G = 5, 4
# positions:    0  1  2  3  4 | 5  6  7  8      rows exist at 0..7
TOKENS = [7, 8, 9, 8, 3, 8, 8, 1, 8]

CASES: list[tuple[Any, list[int]]] = [
    ("all", [0, 1, 2, 3, 4, 5, 6, 7]),
    ("prompt", [0, 1, 2, 3, 4]),
    ("generated", [5, 6, 7]),
    ("last_prompt", [4]),
    ("sampled", [4, 5, 6, 7]),
    # single positions
    (0, [0]),
    (6, [6]),
    (7, [7]),
    (8, []),  # the last generated token has no row
    (99, []),
    (-1, [4]),
    (-5, [0]),
    (-6, []),
    # lists
    ([], []),
    ([2], [2]),
    ([6, 0, 2], [0, 2, 6]),
    ([-1, 4, 4], [4]),
    ([-9, 3, 50], [3]),
    ((1, -2), [1, 3]),
    # slices
    (":", [0, 1, 2, 3, 4, 5, 6, 7]),
    ("::", [0, 1, 2, 3, 4, 5, 6, 7]),
    ("2:", [2, 3, 4, 5, 6, 7]),
    (":3", [0, 1, 2]),
    ("1:4", [1, 2, 3]),
    ("4:4", []),
    ("5:2", []),
    ("-2:", [3, 4, 5, 6, 7]),
    (":-1", [0, 1, 2, 3]),
    ("-3:-1", [2, 3]),
    ("-1:7", [4, 5, 6]),
    ("6:99", [6, 7]),
    ("40:", []),
    ("::3", [0, 3, 6]),
    ("1::3", [1, 4, 7]),
    ("1:7:2", [1, 3, 5]),
    ("-4::2", [1, 3, 5, 7]),
    ("-9::3", [0, 3, 6]),  # before the beginning is the beginning
    (":-9", []),
    # tokens
    ({"token_ids": [8]}, [1, 3, 5, 6]),  # not 8, which has no row
    ({"token_ids": [1, 7]}, [0, 7]),
    ({"token_ids": [8, 8, 9]}, [1, 2, 3, 5, 6]),
    ({"token_ids": [4]}, []),
    ({"token_ids": []}, []),
    ({"not_token_ids": [8]}, [0, 2, 4, 7]),
    ({"not_token_ids": [8, 1, 1]}, [0, 2, 4]),
    ({"not_token_ids": []}, [0, 1, 2, 3, 4, 5, 6, 7]),
]


@pytest.mark.parametrize(("selector", "expected"), CASES, ids=[str(case[0]) for case in CASES])
def test_by_hand(selector: Any, expected: list[int]) -> None:
    assert expected_positions(selector, P, G, TOKENS) == expected


@pytest.mark.parametrize(
    ("selector", "expected"),
    [("all", [0, 1, 2]), ("prompt", [0, 1, 2]), ("generated", []), ("sampled", [2]), (-1, [2]), ("3:", [])],
)
def test_one_generated_token_adds_no_row(selector: Any, expected: list[int]) -> None:
    assert expected_positions(selector, 3, 1) == expected


def test_one_prompt_token() -> None:
    assert expected_positions("sampled", 1, 3) == [0, 1, 2]
    assert expected_positions("last_prompt", 1, 3) == [0]
    assert expected_positions(":-1", 1, 3) == []


@pytest.mark.parametrize("selector", ["", "prompts", "1", "1:2:0", "::-1", "a:b", {"tokens": [1]}, {}, None, 1.5])
def test_nonsense_is_refused(selector: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        expected_positions(selector, P, G, TOKENS)


@pytest.mark.parametrize("selector", [True, [False], ["1"]])
def test_only_integers_are_positions(selector: Any) -> None:
    with pytest.raises(TypeError):
        expected_positions(selector, P, G, TOKENS)
