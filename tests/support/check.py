"""A second, deliberately naive reading of the position selectors, written without looking at the package's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def expected_positions(selector: Any, P: int, G: int, token_ids: Sequence[int] = ()) -> list[int]:
    """The positions a selector picks, ascending, without duplicates.

    P prompt tokens and G generated ones give the rows 0 .. P + G - 2: the last generated token never enters the model.
    `token_ids` are the prompt's and then the generated ones; only `{"token_ids": [...]}` and `{"not_token_ids": [...]}`
    read them.
    """
    picked = []
    for position in range(P + G - 1):
        if _picks(selector, position, P, token_ids):
            picked.append(position)
    return picked


def _picks(selector: Any, position: int, P: int, token_ids: Sequence[int]) -> bool:
    if selector == "all":
        return True
    if selector == "prompt":
        return position < P
    if selector == "generated":
        return position >= P
    if selector == "last_prompt":
        return position == P - 1
    if selector == "sampled":
        return position >= P - 1
    if isinstance(selector, bool):
        raise TypeError("a bool is not a position")
    if isinstance(selector, int):
        return position == (selector if selector >= 0 else P + selector)
    if isinstance(selector, (list, tuple)):
        for one in selector:
            if isinstance(one, bool) or not isinstance(one, int):
                raise TypeError(f"not a position: {one!r}")
            if _picks(one, position, P, token_ids):
                return True
        return False
    if isinstance(selector, dict):
        if set(selector) not in ({"token_ids"}, {"not_token_ids"}):
            raise ValueError(f"not a selector: {selector!r}")
        for listed in selector.get("token_ids", selector.get("not_token_ids")):
            if token_ids[position] == listed:
                return "token_ids" in selector
        return "not_token_ids" in selector
    if isinstance(selector, str) and ":" in selector:
        return _in_slice(selector, position, P)
    raise ValueError(f"not a selector: {selector!r}")


def _in_slice(text: str, position: int, P: int) -> bool:
    parts = text.split(":")
    if len(parts) == 2:
        parts.append("")
    start_text, stop_text, step_text = (part.strip() for part in parts)
    start = int(start_text) if start_text else 0
    if start < 0:
        start = P + start
    if start < 0:
        start = 0  # as in Python: a start before the beginning is the beginning, and steps count from there
    step = int(step_text) if step_text else 1
    if step < 1:
        raise ValueError(f"a step must be at least 1: {text!r}")
    if position < start or (position - start) % step != 0:
        return False
    if stop_text == "":
        return True
    stop = int(stop_text)
    if stop < 0:
        stop = P + stop
    return position < stop
