"""How many rows an output can come to have, for servers that bound it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.admitted import AdmittedRequest
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.request import selected
from vllm_weir.schema.row_shapes import ring_rows

SCORES_PER_ROW = 16
"""Scores that an output may have where it may have one row."""


def check_rows(admitted: AdmittedRequest, prompt_len: int, generated: int, d_model: int, max_rows: int) -> None:
    """Raise WeirError if the output can have more than `max_rows` rows, or too many scores for so many.

    A row of a derived point counts as as many rows of `d_model` values as it fills.

    Args:
        admitted: the request.
        prompt_len: tokens of the prompt.
        generated: most tokens that it can generate.
        d_model: width of the model.
        max_rows: the bound.
    """
    _check_scores(admitted, prompt_len + generated - 1, prompt_len, max_rows)
    part = admitted.parts[0]
    spec, positions = part.spec, prompt_len + generated - 1
    is_reduced = spec.postprocess is not None and spec.postprocess.reduce is not None
    groups = [] if is_reduced else [(len(sites), selectors) for sites, selectors in spec.by_positions]
    groups += [(ring_rows(recipe.width(positions), d_model), recipe.positions) for recipe in part.recipes]
    if sum(weight for weight, _ in groups) * positions <= max_rows:
        return
    rows = sum(weight * _count(selectors, prompt_len, positions) for weight, selectors in groups)
    if rows > max_rows:
        raise WeirError(
            f"up to {rows} rows would come back, the server allows {max_rows} (WEIR_SERVE_ROWS); "
            "ask for fewer blocks or positions, reduce them, name a sink, or lower max_tokens",
            "capture",
        )


def _count(selectors: Sequence[Positions], prompt_len: int, positions: int) -> int:
    """Return how many of the first positions are selected, at most: generated tokens are not known yet."""
    if any(selector.needs_token_ids for selector in selectors):
        return positions
    return len(selected(selectors, prompt_len, np.full(positions, -1)))


def _check_scores(admitted: AdmittedRequest, positions: int, prompt_len: int, max_rows: int) -> None:
    """Raise WeirError if the output can have more scores than a server with this limit of rows returns."""
    most = SCORES_PER_ROW * max_rows
    if sum(probe.outputs for probe in admitted.probes) * positions <= most:
        return
    scores = 0
    for probe in admitted.probes:
        chosen = _count((probe.positions,), prompt_len, positions)
        scores += probe.outputs * chosen
    if scores > most:
        raise WeirError(
            f"up to {scores} scores would come back, the server allows {most} ({SCORES_PER_ROW} for each of "
            "WEIR_SERVE_ROWS); ask for fewer probes or positions, or lower max_tokens",
            "probes",
        )
