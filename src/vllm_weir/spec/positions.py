"""Position selectors: which positions of a request a capture or an intervention is about.

Position p counts from 0 over the prompt and then the generated tokens. With P prompt tokens the sampled tokens are
drawn from rows P-1, P, ...; the number of generated tokens is unknown until the request ends, so a selector answers
for any position as if generation never stopped, and whoever holds the rows cuts at the last one reached.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_weir.errors import WeirError, brief

KEYWORDS = ("all", "prompt", "generated", "last_prompt", "sampled")
MAX_LIST = 65_536
ENDLESS = 2**63 - 1
"""A position that is never reached."""
_LIMIT = 2**31 - 1
_SLICE = re.compile(r"(-?\d+)?:(-?\d+)?(?::(-?\d+)?)?")


@dataclass(frozen=True)
class Positions:
    """A parsed selector. `kind` is a keyword, ``"list"``, ``"slice"`` or ``"token_ids"``; `values` its numbers."""

    kind: str
    values: tuple[int | None, ...] = ()

    @classmethod
    def parse(cls, selector: object, field: str = "positions") -> Positions:
        """A selector in any of its public forms; raises WeirError naming `field`."""
        if isinstance(selector, Positions):
            return selector
        if isinstance(selector, str):
            return cls._parse_text(selector, field)
        if isinstance(selector, dict):
            return cls._parse_token_ids(selector, field)
        if _is_int(selector):
            return cls("list", (_in_range(selector, field),))
        if isinstance(selector, range):
            selector = list(selector[: MAX_LIST + 1])
        selector = _listed(selector)
        if isinstance(selector, Sequence):
            return cls("list", _ints(selector, field))
        raise WeirError(
            f"cannot read positions from {type(selector).__name__}; use one of {', '.join(KEYWORDS)}, an int, a list "
            "of ints, 'start:stop:step' or {'token_ids': [...]}",
            field,
        )

    @classmethod
    def _parse_text(cls, text: str, field: str) -> Positions:
        if text in KEYWORDS:
            return cls(text)
        match = _SLICE.fullmatch(text)
        if match is None or len(text) > 64:
            raise WeirError(
                f"unknown selector {text[:80]!r}; use one of {', '.join(KEYWORDS)} or 'start:stop:step'", field
            )
        start, stop, step = (None if part is None else int(part) for part in match.groups())
        if step is not None and step < 1:
            raise WeirError(f"the step of {text!r} must be at least 1", field)
        bounds = tuple(None if v is None else _in_range(v, field) for v in (start, stop, step))
        return cls("slice", bounds)

    @classmethod
    def _parse_token_ids(cls, selector: dict, field: str) -> Positions:
        if set(selector) != {"token_ids"}:
            raise WeirError(
                f"a selector dict has the one key 'token_ids', got {sorted(map(brief, selector))[:5]}", field
            )
        ids = _listed(selector["token_ids"])
        if _is_int(ids):
            ids = [ids]
        if isinstance(ids, str) or not isinstance(ids, Sequence):
            raise WeirError("token_ids is a list of ints", f"{field}.token_ids")
        values = _ints(ids, f"{field}.token_ids")
        if any(v < 0 for v in values):
            raise WeirError("a token id is never negative", f"{field}.token_ids")
        return cls("token_ids", tuple(sorted(set(values))))

    def to_json(self) -> str | list | dict:
        """The wire form; ``Positions.parse`` reads it back."""
        if self.kind == "list":
            return list(self.values)
        if self.kind == "slice":
            return ":".join("" if v is None else str(v) for v in self.values).removesuffix(":")
        if self.kind == "token_ids":
            return {"token_ids": list(self.values)}
        return self.kind

    def mask(self, positions: np.ndarray, prompt_len: int, token_ids: np.ndarray | None = None) -> np.ndarray:
        """Which of `positions` are selected.

        Args:
            positions: int array [n] of absolute positions.
            prompt_len: P.
            token_ids: int array [n], the token at each position, or None when unknown; then a ``token_ids`` selector
                selects every position (a superset, to be filtered when the tokens are known).

        Returns:
            bool array [n].
        """
        if self.kind == "all":
            return np.ones(len(positions), bool)
        if self.kind == "prompt":
            return positions < prompt_len
        if self.kind == "generated":
            return positions >= prompt_len
        if self.kind == "last_prompt":
            return positions == prompt_len - 1
        if self.kind == "sampled":
            return positions >= prompt_len - 1
        if self.kind == "list":
            return np.isin(positions, _resolve(self.values, prompt_len))
        if self.kind == "slice":
            return self._slice_mask(positions, prompt_len)
        if token_ids is None:
            return np.ones(len(positions), bool)
        return np.isin(token_ids, self.numbers)

    def _slice_mask(self, positions: np.ndarray, prompt_len: int) -> np.ndarray:
        first, stop, step = self._start(prompt_len), self._stop(prompt_len), self.values[2]
        chosen = positions >= first
        if stop is not None:
            chosen &= positions < stop
        if step not in (None, 1):
            chosen &= (positions - first) % step == 0
        return chosen

    def first(self, prompt_len: int, prompt_token_ids: Sequence[int] | None = None) -> int | None:
        """The first position that can be selected, or None if there is none: what a prefix-cache hit must not pass."""
        if self.kind in ("all", "prompt"):
            return 0
        if self.kind == "generated":
            return prompt_len
        if self.kind in ("last_prompt", "sampled"):
            return prompt_len - 1
        if self.kind == "list":
            reached = [v for v in _resolve(self.values, prompt_len) if v >= 0]
            return min(reached, default=None)
        if self.kind == "slice":
            low, high = self._start(prompt_len), self._stop(prompt_len)
            return low if high is None or high > low else None
        if not self.values:
            return None
        if prompt_token_ids is None:
            return 0
        hits = np.flatnonzero(np.isin(np.asarray(prompt_token_ids), self.numbers))
        return int(hits[0]) if len(hits) else prompt_len

    def steady(self, prompt_len: int) -> tuple[int, bool] | None:
        """(position, selected): from that position on the answer never changes; None if it keeps changing.

        For ``token_ids`` the answer is the superset that `mask` gives while the tokens are unknown.
        """
        if self.kind == "all":
            return 0, True
        if self.kind in ("prompt", "last_prompt"):
            return prompt_len, False
        if self.kind in ("generated", "token_ids"):
            return prompt_len, True
        if self.kind == "sampled":
            return prompt_len - 1, True
        if self.kind == "list":
            return max(_resolve(self.values, prompt_len), default=-1) + 1, False
        stop = self._stop(prompt_len)
        if stop is not None:
            return max(0, stop), False
        return (self._start(prompt_len), True) if self.values[2] in (None, 1) else None

    def bounds(self, prompt_len: int) -> tuple[int, int] | None:
        """(first, end): every position between them is selected and no other; None if that is not known to be so."""
        if self.kind == "all":
            return 0, ENDLESS
        if self.kind == "prompt":
            return 0, prompt_len
        if self.kind == "generated":
            return prompt_len, ENDLESS
        if self.kind == "last_prompt":
            return prompt_len - 1, prompt_len
        if self.kind == "sampled":
            return prompt_len - 1, ENDLESS
        if self.kind == "list":
            reached = {v for v in _resolve(self.values, prompt_len) if v >= 0}
            first, last = min(reached, default=0), max(reached, default=-1)
            return (first, last + 1) if last - first + 1 == len(reached) else None
        if self.kind == "token_ids" or self.values[2] not in (None, 1):
            return None
        first, stop = self._start(prompt_len), self._stop(prompt_len)
        return first, ENDLESS if stop is None else max(first, stop)

    def count(self, prompt_len: int | None = None, end: int | None = None) -> int | None:
        """How many positions are named, where the selector says so by itself; None where it does not, or names none.

        Of a list: those that differ and, with a prompt of `prompt_len` tokens, do not fall before position 0. What is
        only bounded by the request needs that length, too, and `end`, the first position that it cannot reach.
        """
        if self.kind == "last_prompt":
            return 1
        if self.kind == "list":
            at = self.numbers if prompt_len is None else [v for v in _resolve(self.values, prompt_len) if v >= 0]
            return len(set(at)) or None
        if prompt_len is None:
            return self._slice_count()
        if self.kind == "token_ids":
            return None
        if self.kind == "slice":
            first, last, step = self._start(prompt_len), self._stop(prompt_len), self.values[2] or 1
        else:
            (first, last), step = self.bounds(prompt_len) or (0, 0), 1
        if last in (None, ENDLESS):
            last = end
        return None if last is None else len(range(first, last, step)) or None

    def _slice_count(self) -> int | None:
        if self.kind != "slice" or self.values[1] is None:
            return None
        start, stop, step = self.values[0] or 0, self.values[1], self.values[2] or 1
        return None if (start < 0) != (stop < 0) else len(range(start, stop, step)) or None

    def rank(self, position: int, prompt_len: int) -> int:
        """How many selected positions come before the selected `position`; not for ``token_ids``."""
        if self.kind in ("all", "prompt"):
            return position
        if self.kind == "generated":
            return position - prompt_len
        if self.kind in ("last_prompt", "sampled"):
            return position - prompt_len + 1
        if self.kind == "list":
            return sum(0 <= v < position for v in set(_resolve(self.values, prompt_len)))
        if self.kind == "slice":
            return (position - self._start(prompt_len)) // (self.values[2] or 1)
        raise AssertionError("the rank among positions chosen by token is unknown")

    def _start(self, prompt_len: int) -> int:
        start = self.values[0]
        return 0 if start is None else max(0, start + prompt_len if start < 0 else start)

    def _stop(self, prompt_len: int) -> int | None:
        stop = self.values[1]
        return stop + prompt_len if stop is not None and stop < 0 else stop

    @property
    def numbers(self) -> tuple[int, ...]:
        """The values of a list or of ``token_ids``."""
        return tuple(v for v in self.values if v is not None)

    @property
    def is_open(self) -> bool:
        """Whether how many positions it selects depends on more than the prompt's length."""
        if self.kind == "slice":
            return self.values[1] is None
        return self.kind not in ("prompt", "last_prompt", "list")

    @property
    def needs_token_ids(self) -> bool:
        """Whether selecting needs to know which token stands at a position."""
        return self.kind == "token_ids"


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))


def _listed(values: object) -> object:
    """An array or a tensor of one dimension as a list; anything else as it is."""
    return values.tolist() if getattr(values, "ndim", None) == 1 and hasattr(values, "tolist") else values


def _in_range(value, field: str) -> int:
    if not -_LIMIT <= value <= _LIMIT:
        raise WeirError(f"position {brief(value)} is out of range", field)
    return int(value)


def _ints(values: Sequence | np.ndarray, field: str) -> tuple[int, ...]:
    if len(values) > MAX_LIST:
        raise WeirError(f"{len(values)} entries, more than the limit of {MAX_LIST}; use a slice or a keyword", field)
    for i, value in enumerate(values):
        if not _is_int(value):
            raise WeirError(f"expected an int, got {type(value).__name__}", f"{field}[{i}]")
        _in_range(value, f"{field}[{i}]")
    return tuple(int(v) for v in values)


def _resolve(values: tuple[int | None, ...], prompt_len: int) -> list[int]:
    """Absolute positions; a negative one counts back from the prompt's end and may fall before position 0."""
    return [v + prompt_len if v < 0 else v for v in values if v is not None]
