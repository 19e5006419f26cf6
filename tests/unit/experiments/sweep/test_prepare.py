"""Prompts of a sweep, before an engine is asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vllm_weir.errors import WeirError
from vllm_weir.experiments.sweep.prepare import parse_prompts


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("a b", ["a b"]),
        (["a", "b"], ["a", "b"]),
        ([3, 4], [(3, 4)]),
        (np.array([3, 4]), [(3, 4)]),
        ([[3, 4], "b", np.array([5])], [(3, 4), "b", (5,)]),
        (((1, 2), (3,)), [(1, 2), (3,)]),
    ],
)
def test_prompts(value: Any, wanted: Any) -> None:
    assert parse_prompts(value, "clean") == wanted


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ([], "clean"), (None, "clean"), (5, "clean"), ({"a": 1}, "clean"), ([-1, 2], "clean"), (["a", 5], "clean[1]"),
        ([[1], [2.5]], "clean[1]"), ([[1], {"b": 2}], "clean[1]"),
    ],
)  # fmt: skip
def test_refused(value: Any, field: str) -> None:
    with pytest.raises(WeirError) as error:
        parse_prompts(value, "clean")
    assert error.value.field == field
