"""How many rows an output can come to have, for servers that bound it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admitted import AdmittedRequest
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.read_outs import FEATURES, LENS
from vllm_weir.schema.request import selected
from vllm_weir.schema.row_shapes import ring_rows

NUMBERS_PER_ROW = 16
"""Numbers of scores, features and lenses that an output may have where it may have one row."""


class _Asked(NamedTuple):
    """What an output has at the positions that any of some selectors chooses, at each so much; and its field."""

    weight: int
    selectors: tuple[Positions, ...]
    field: str


def check_rows(admitted: AdmittedRequest, prompt_len: int, generated: int, d_model: int, max_rows: int) -> None:
    """Raise WeirError if the output can have more than `max_rows` rows, or too many other numbers for so many.

    A row of a derived point counts as as many rows of `d_model` values as it fills.
    """
    part, positions = admitted.parts[0], prompt_len + generated - 1
    numbers = [_Asked(probe.outputs, (probe.positions,), "probes") for probe in admitted.probes]
    rows = [_Asked(ring_rows(recipe.width(positions), d_model), recipe.positions, "capture") for recipe in part.recipes]
    if part.routed is not None:
        requests = part.routed.group.spec.site_requests
        rows += [_Asked(one.ring_rows, (one.positions,), "routing") for one in requests]
    for sites, selectors, how in part.groups:
        if how is None or how.reduce is None:
            rows.append(_Asked(len(sites), selectors, "capture"))
            if how is not None and how.directions:
                numbers.append(_Asked(len(sites) * len(how.directions), selectors, "capture"))
    for one in part.read_outs:  # each value has an id
        field = LENS if one.read_out.kind == LENS else FEATURES
        numbers.append(_Asked(2 * one.read_out.width, (one.positions,), field))
    _check(rows, prompt_len, positions, max_rows, "rows", "(WEIR_SERVE_ROWS)")
    most, per_row = NUMBERS_PER_ROW * max_rows, f"({NUMBERS_PER_ROW} for each of WEIR_SERVE_ROWS)"
    _check(numbers, prompt_len, positions, most, "numbers", per_row)


def _check(asked: Sequence[_Asked], prompt_len: int, positions: int, most: int, what: str, limit: str) -> None:
    """Raise WeirError, naming the field that asks for most, if more than `most` can be selected in all."""
    if sum(one.weight for one in asked) * positions <= most:
        return
    counts = [one.weight * _count(one.selectors, prompt_len, positions) for one in asked]
    if sum(counts) > most:
        raise WeirError(
            f"up to {sum(counts)} {what} would come back, the server allows {most} {limit}; ask for fewer blocks, "
            "positions or values of each, reduce them, name a sink, or lower max_tokens",
            asked[counts.index(max(counts))].field,
        )


def _count(selectors: Sequence[Positions], prompt_len: int, positions: int) -> int:
    """Return how many of the first positions are selected, at most: generated tokens are not known yet."""
    if any(selector.needs_token_ids for selector in selectors):
        return positions
    return len(selected(selectors, prompt_len, np.full(positions, -1)))
