"""Which rows of a dataset a position selector selects."""

from __future__ import annotations

import itertools

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.positions import Positions
from vllm_weir.storage.index import Index


def selected_rows(index: Index, row_runs: np.ndarray, row_ids: np.ndarray, selector: Positions) -> np.ndarray:
    """Return which rows a selector selects: bool [rows].

    The rows are named as by `Index.expand`, and ordered by request.
    """
    if selector.kind == "modality":
        raise WeirError(
            "a dataset does not say where a prompt's images are; store their rows alone, with this selector in the "
            "capture, or name the placeholder's id, {'token_ids': [...]}",
            "positions.modality",
        )
    if selector.kind == "all":
        return np.ones(len(row_ids), bool)
    positions, tokens = index.positions[row_ids], index.token_ids[row_ids]
    row_requests = index.run_request[row_runs]
    if selector.needs_token_ids:
        _check_tokens(index, row_requests, tokens, selector)
        return selector.mask(positions, 0, tokens)
    if selector.kind == "list" and min(selector.numbers, default=0) >= 0:
        return selector.mask(positions, 0, tokens)
    selected = np.zeros(len(row_ids), bool)
    bounds = np.flatnonzero(np.diff(row_requests, prepend=-1, append=-1))
    for start, end in itertools.pairwise(bounds.tolist()):
        prompt_tokens = _prompt_tokens(index, int(row_requests[start]), selector)
        selected[start:end] = selector.mask(positions[start:end], prompt_tokens, tokens[start:end])
    return selected


def _check_tokens(index: Index, row_requests: np.ndarray, tokens: np.ndarray, selector: Positions) -> None:
    """Raise WeirError if a selector by token cannot be evaluated."""
    if selector.kind == "special":
        field = "token_ids" if selector.values[0] else "not_token_ids"
        raise WeirError(
            f"a dataset has no tokenizer to say which tokens are special; name them, {{{field!r}: "
            "tokenizer.all_special_ids}",
            "positions.special",
        )
    unknown = np.flatnonzero(tokens < 0)
    if len(unknown):
        raise WeirError(
            f"request {index.requests[row_requests[unknown[0]]][:80]!r} was stored without token ids; select by "
            "position",
            f"positions.{selector.kind}",
        )


def _prompt_tokens(index: Index, request: int, selector: Positions) -> int:
    """Return the prompt length of a request, or 0 if it is unknown and does not matter."""
    prompt_tokens = index.request_metadata(request).get("prompt_tokens")
    if isinstance(prompt_tokens, int) and not isinstance(prompt_tokens, bool) and prompt_tokens >= 0:
        return prompt_tokens
    bounds = selector.values[:2] if selector.kind == "slice" else (-1,)
    if all(bound is None or bound >= 0 for bound in bounds):
        return 0
    raise WeirError(
        f"request {index.requests[request][:80]!r} was stored without prompt_tokens, which "
        f"{selector.to_json()!r} counts from; use absolute positions",
        "positions",
    )
