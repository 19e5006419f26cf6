"""Selector codes, bit masks of the selectors that choose a position; and whether selectors choose any."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.positions import ENDLESS, Positions

Asked = tuple[tuple[Positions, str], ...]
"""(selector, field that it was given in)."""
MAX_SELECTORS = 63
"""The bits of a positive int64."""
NEVER = ENDLESS
MOST_SHARED = 64
"""Selectors with more numbers than this are not cached from request to request."""
MOST_STEPS = 16
"""Steps for which the selected positions are cached."""


def selector_bits(selectors: Iterable[Positions]) -> dict[Positions, int]:
    """Return the distinct ones among selectors, each with its bit in the codes of positions."""
    return {positions: bit for bit, positions in enumerate(dict.fromkeys(selectors))}


class Selectors:
    """A request's distinct selectors, and the codes that they give to positions.

    Attributes:
        distinct: the selectors; bit k of a code is that of ``distinct[k]``.
        prompt_len: tokens of the prompt.
        by_token: bits of the selectors that depend on the token at a position.
    """

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
    def intervals(self) -> list[tuple[int, int, int]] | None:
        """(code, first, end) wherever the code is not 0; None if a selector may have gaps."""
        bounds = [s.bounds(self.prompt_len) for s in self.distinct]
        edges: set[int] = set()
        for bound in bounds:
            if bound is None:
                return None
            if bound[0] < bound[1]:
                edges.update(bound)
        intervals = []
        for first, end in itertools.pairwise(sorted(edges)):
            code = sum(1 << bit for bit, b in enumerate(bounds) if b is not None and b[0] <= first < b[1])
            if code:
                intervals.append((code, first, end))
        return intervals

    def runs(self, start: int, end: int) -> tuple[tuple[int, int, int], ...] | None:
        """Return the part of `intervals` between `start` and `end` (not included)."""
        intervals = self.intervals
        if intervals is None:
            return None
        runs = self._runs.get((start, end))
        if runs is None:
            runs = tuple((code, max(a, start), min(b, end)) for code, a, b in intervals if a < end and b > start)
            _cache(self._runs, (start, end), runs)
        return runs

    def codes(self, positions: np.ndarray) -> np.ndarray:
        """Return the codes of `positions` [n], int64 [n].

        A selector by token takes every generated position, since generated tokens are known on the
        device only.
        """
        if len(self.distinct) == 1 and not self.by_token:
            return self.distinct[0].mask(positions, self.prompt_len).astype(np.int64)
        tokens = None
        if self._prompt_ids is not None:
            tokens = np.full(len(positions), -1, np.int64)
            in_prompt = positions < len(self._prompt_ids)
            tokens[in_prompt] = self._prompt_ids[positions[in_prompt]]
        codes = np.zeros(len(positions), np.int64)
        for bit, selector in enumerate(self.distinct):
            if selector.needs_token_ids and tokens is not None:
                chosen = selector.mask(positions, self.prompt_len, tokens) | (positions >= self.prompt_len)
            else:
                chosen = selector.mask(positions, self.prompt_len)
            codes |= chosen.astype(np.int64) << bit
        return codes

    def count(self, code: int, start: int, end: int) -> tuple[int, int]:
        """Count positions start..end-1 that have `code`: (in the prompt, all)."""
        count = self._counts.get((code, start, end))
        if count is None:
            count = self._count(code, start, end)
            _cache(self._counts, (code, start, end), count)
        return count

    def _count(self, code: int, start: int, end: int) -> tuple[int, int]:
        runs = self.runs(start, end)
        if runs is None:
            codes = self.codes(np.arange(start, end))
            return int((codes[: max(0, self.prompt_len - start)] == code).sum()), int((codes == code).sum())
        spans = [(first, last) for run_code, first, last in runs if run_code == code]
        in_prompt = sum(max(0, min(last, self.prompt_len) - first) for first, last in spans)
        return in_prompt, sum(last - first for first, last in spans)

    @functools.cached_property
    def steady(self) -> tuple[int, int]:
        """(position, code) of that and all later positions; (NEVER, 0) if codes keep changing."""
        start = code = 0
        for bit, selector in enumerate(self.distinct):
            steady = selector.steady(self.prompt_len)
            if steady is None:
                return NEVER, 0
            start = max(start, steady[0])
            code |= steady[1] << bit
        return start, code


def _cache(entries: dict[Any, Any], key: object, value: object) -> None:
    """Keep a value; a few are enough, since requests that share selectors mostly share steps."""
    if len(entries) >= MOST_STEPS:
        entries.clear()
    entries[key] = value


class SelectorSet:
    """Distinct selectors that several requests have in common."""

    def __init__(self, distinct: tuple[Positions, ...]) -> None:
        self.distinct = distinct
        few_numbers = sum(len(s.values) for s in distinct) <= MOST_SHARED
        self._shareable = few_numbers and not any(s.needs_token_ids for s in distinct)

    def of(self, prompt_len: int, prompt_ids: Sequence[int] | None) -> Selectors:
        """Return the selectors of one request, one object for all requests that select alike.

        Raises:
            WeirError: if there are more than `MAX_SELECTORS`.
        """
        if self._shareable:
            return _shared(self.distinct, prompt_len)
        return Selectors(self.distinct, prompt_len, prompt_ids)


@functools.lru_cache(maxsize=1024)
def _shared(distinct: tuple[Positions, ...], prompt_len: int) -> Selectors:
    return Selectors(distinct, prompt_len, None)


def distinct(codes: np.ndarray) -> np.ndarray:
    """Return the distinct codes other than 0, ascending."""
    first = codes[0]
    if first and (codes == first).all():
        return codes[:1]
    return np.unique(codes[codes > 0])


def joined_codes(codes: np.ndarray, behind: int) -> np.ndarray:
    """Return the codes of positions that may be up to `behind` less than planned.

    Args:
        codes: int64 [behind + n], of all positions that may be meant.
        behind: how much less.

    Returns:
        int64 [n]: of each planned position, the selectors that select any position it may be.
    """
    joined = codes[behind:].copy()
    for less in range(1, behind + 1):
        joined |= codes[behind - less : len(codes) - less]
    return joined


def check_reached(asked: Asked, prompt_len: int, generated: int, max_tokens: int) -> None:
    """Raise WeirError for a selector that selects none of a request's rows.

    Args:
        asked: the request's selectors, each with the field that it was given in.
        prompt_len: tokens of the prompt.
        generated: tokens that the request can generate.
        max_tokens: as it was asked.
    """
    end = prompt_len + generated - 1
    for positions, field in asked:
        if positions.reaches(prompt_len, end):
            continue
        limit, setting = f"max_tokens={max_tokens}", "max_tokens"
        if generated < max_tokens:
            limit, setting = f"{limit}, of which max_model_len leaves room for {generated},", "max_model_len"
        if positions.kind == "generated":
            raise WeirError(
                f"'generated' selects no row: with {limit} the one generated token never enters the model; use "
                f"'sampled' (the rows that outputs are sampled from) or 'last_prompt', or raise {setting}",
                field,
            )
        raise WeirError(
            f"{brief(positions.to_json())} selects no row: with {_tokens(prompt_len)} in the prompt and {limit} the "
            f"last position that has one is {end - 1}; name some from 0 to {end - 1}, or raise {setting}",
            field,
        )


def _tokens(count: int) -> str:
    return f"{count} token{'s'[: count != 1]}"
