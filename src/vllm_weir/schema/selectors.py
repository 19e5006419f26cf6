"""Which rows of a request are wanted, as numbers: taps, columns and selector codes. Pure numpy."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.positions import ENDLESS, Positions

MAX_SELECTORS = 63
"""What the bits of an int64 can tell apart."""
NEVER = ENDLESS
MOST_SHARED = 64
"""Numbers in selectors that are remembered from request to request."""
MOST_STEPS = 16
"""Steps for which it is remembered what selectors choose in them."""


class Selectors:
    """A request's distinct selectors; positions get a code, the bit mask of the selectors that choose them."""

    def __init__(self, distinct: Sequence[Positions], prompt_len: int, prompt_ids: Sequence[int] | None) -> None:
        if len(distinct) > MAX_SELECTORS:
            raise WeirError(
                f"{len(distinct)} different position selectors in one request; at most {MAX_SELECTORS} are served",
                "interventions",
            )
        self.distinct = list(distinct)
        self.prompt_len = prompt_len
        self.by_token = [bit for bit, s in enumerate(self.distinct) if s.needs_token_ids]
        self._prompt_ids = np.asarray(prompt_ids, np.int64) if self.by_token and prompt_ids is not None else None
        self._runs: dict[tuple[int, int], tuple[tuple[int, int, int], ...]] = {}
        self._counts: dict[tuple[int, int, int], tuple[int, int]] = {}

    @functools.cached_property
    def stretches(self) -> list[tuple[int, int, int]] | None:
        """(code, first, end): where the code is not 0, ascending; None if a selector may not choose one stretch."""
        bounds = [s.bounds(self.prompt_len) for s in self.distinct]
        edges: set[int] = set()
        for bound in bounds:
            if bound is None:
                return None
            if bound[0] < bound[1]:
                edges.update(bound)
        out = []
        for first, end in itertools.pairwise(sorted(edges)):
            code = sum(1 << bit for bit, b in enumerate(bounds) if b is not None and b[0] <= first < b[1])
            if code:
                out.append((code, first, end))
        return out

    def runs(self, start: int, end: int) -> tuple[tuple[int, int, int], ...] | None:
        """`stretches`, as far as they lie between `start` and `end` (not included)."""
        stretches = self.stretches
        if stretches is None:
            return None
        runs = self._runs.get((start, end))
        if runs is None:
            runs = tuple((code, max(a, start), min(b, end)) for code, a, b in stretches if a < end and b > start)
            _remember(self._runs, (start, end), runs)
        return runs

    def codes(self, positions: np.ndarray) -> np.ndarray:
        """int64 [n]. A selector by token takes every generated position: its token is only on the device."""
        if len(self.distinct) == 1 and not self.by_token:
            return self.distinct[0].mask(positions, self.prompt_len).astype(np.int64)
        tokens = None
        if self._prompt_ids is not None:
            tokens = np.full(len(positions), -1, np.int64)
            known = positions < len(self._prompt_ids)
            tokens[known] = self._prompt_ids[positions[known]]
        codes = np.zeros(len(positions), np.int64)
        for bit, selector in enumerate(self.distinct):
            if selector.needs_token_ids and tokens is not None:
                chosen = selector.mask(positions, self.prompt_len, tokens) | (positions >= self.prompt_len)
            else:
                chosen = selector.mask(positions, self.prompt_len)
            codes |= chosen.astype(np.int64) << bit
        return codes

    def count(self, code: int, start: int, end: int) -> tuple[int, int]:
        """(of the prompt, altogether): positions from `start` to `end` (not included) that have `code`."""
        count = self._counts.get((code, start, end))
        if count is None:
            count = self._count(code, start, end)
            _remember(self._counts, (code, start, end), count)
        return count

    def _count(self, code: int, start: int, end: int) -> tuple[int, int]:
        runs = self.runs(start, end)
        if runs is None:
            codes = self.codes(np.arange(start, end))
            return int((codes[: max(0, self.prompt_len - start)] == code).sum()), int((codes == code).sum())
        mine = [(a, b) for this, a, b in runs if this == code]
        return sum(max(0, min(b, self.prompt_len) - a) for a, b in mine), sum(b - a for a, b in mine)

    @functools.cached_property
    def steady(self) -> tuple[int, int]:
        """(position, code): the code of that position and of all later ones; position NEVER if it keeps changing."""
        start = code = 0
        for bit, selector in enumerate(self.distinct):
            steady = selector.steady(self.prompt_len)
            if steady is None:
                return NEVER, 0
            start = max(start, steady[0])
            code |= steady[1] << bit
        return start, code


def _remember(known: dict[Any, Any], key: object, value: object) -> None:
    """Requests whose positions are chosen alike mostly come in the same steps, so a few are enough."""
    if len(known) >= MOST_STEPS:
        known.clear()
    known[key] = value


class SelectorSet:
    """Distinct selectors that requests have in common."""

    def __init__(self, distinct: tuple[Positions, ...]) -> None:
        self.distinct = distinct
        few = sum(len(s.values) for s in distinct) <= MOST_SHARED
        self._alike = few and not any(s.needs_token_ids for s in distinct)

    def of(self, prompt_len: int, prompt_ids: Sequence[int] | None) -> Selectors:
        """For one request: the same object for all whose positions are chosen alike; raises WeirError for too many."""
        if self._alike:
            return _shared(self.distinct, prompt_len)
        return Selectors(self.distinct, prompt_len, prompt_ids)


@functools.lru_cache(maxsize=1024)
def _shared(distinct: tuple[Positions, ...], prompt_len: int) -> Selectors:
    return Selectors(distinct, prompt_len, None)


def distinct(codes: np.ndarray) -> np.ndarray:
    """The codes but 0, ascending."""
    first = codes[0]
    if first and (codes == first).all():
        return codes[:1]
    return np.unique(codes[codes > 0])
