"""Which rows of a request are wanted, as numbers: taps, columns and selector codes. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.spec.hooks import Site
from vllm_weir.spec.positions import Positions

MAX_SELECTORS = 63
"""What the bits of an int64 can tell apart."""
STAGES = 3
"""Moments at one tap: before its interventions, after them, and at a boundary of two blocks also after resid_pre's."""
_IN_BLOCK = {"attn_out": 3, "resid_mid": 4, "mlp_out": 5}
NEVER = np.iinfo(np.int64).max


def tap_of(site: Site) -> int:
    """The tap that serves a site: 0 the embedding, 1 the final norm, 2 what enters block 0; then four for each block L.

    Those are 4L+3 `attn_out`, 4L+4 `resid_mid`, 4L+5 `mlp_out` and 4L+6, which is block L's `resid_post` and the next
    one's `resid_pre`.
    """
    if site.hook == "embed":
        return 0
    if site.hook == "final_norm":
        return 1
    if site.hook in _IN_BLOCK:
        return 4 * site.layer + _IN_BLOCK[site.hook]
    return 4 * site.layer + (2 if site.hook == "resid_pre" else 6)


def is_boundary(tap: int) -> bool:
    """Whether a tap is on the stream between two blocks, before the first or after the last."""
    return tap >= 2 and tap % 4 == 2


def num_taps(num_layers: int) -> int:
    """Taps of a model of `num_layers` blocks, those that are not placed included."""
    return 4 * num_layers + 3


def column_of(site: Site, before: bool) -> int:
    """Column of the rank table: the tap and the stage at which the site's row is read."""
    stage = (1 if before else 2) if site.hook == "resid_pre" else (0 if before else 1)
    return tap_of(site) * STAGES + stage


class Selectors:
    """A request's distinct selectors; positions get a code, the bit mask of the selectors that choose them."""

    def __init__(self, distinct: Sequence[Positions], prompt_len: int, prompt_ids: np.ndarray | None) -> None:
        if len(distinct) > MAX_SELECTORS:
            raise WeirError(
                f"{len(distinct)} different position selectors in one request; at most {MAX_SELECTORS} are served",
                "interventions",
            )
        self.distinct = list(distinct)
        self.prompt_len = prompt_len
        self.by_token = [bit for bit, s in enumerate(self.distinct) if s.needs_token_ids]
        self._prompt_ids = prompt_ids if self.by_token else None

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
        if len(self.distinct) == 1 and self.distinct[0].kind == "all":
            return max(0, self.prompt_len - start), end - start
        codes = self.codes(np.arange(start, end))
        return int((codes[: max(0, self.prompt_len - start)] == code).sum()), int((codes == code).sum())

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
