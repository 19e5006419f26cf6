"""What requests' metadata say about rows: how they were captured, which a selector picks, and their source."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.capture import ROW_NOTES_KEY, entries_of, in_words, is_about
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.positions import Positions
from vllm_weir.storage.index import Index

SOURCE = "source"
"""Key of the metadata under which a conversion stores the notes of its source."""
MAX_NOTES = 8
"""Kinds of rows that are listed one by one."""
UNPLACED = ("mean", "max")
"""Reductions whose row belongs to no single position; that of ``"last"`` does."""


def check_placed(index: Index, requests: Iterable[int], site: Site, selector: Positions) -> None:
    """Raise WeirError if rows of a site stand for several positions each."""
    for request, metadata in _with_entry(index, requests, ROW_NOTES_KEY):
        for entry in entries_of(metadata):
            if is_about(entry, site) and entry.get("reduce") in UNPLACED:
                raise WeirError(
                    f"the row of {site} of request {index.requests[request][:80]!r} is the {entry['reduce']} over "
                    f"positions {entry.get('positions', 'all')!r}, so {brief(selector.to_json())} cannot select it; "
                    "leave positions out, or leave such requests out",
                    "positions",
                )


def capture_notes(index: Index) -> list[str]:
    """Describe every kind of rows that are not simply those of all positions, a line each."""
    counts: Counter[str] = Counter()
    for _, metadata in _with_entry(index, range(len(index.requests)), ROW_NOTES_KEY):
        counts.update({json.dumps(entry, sort_keys=True) for entry in entries_of(metadata)})
    notes = [
        f"{in_words(json.loads(text))} ({count:,} request{'s'[: count != 1]})" for text, count in counts.most_common()
    ]
    if len(notes) <= MAX_NOTES:
        return notes
    return [*notes[:MAX_NOTES], f"and {len(notes) - MAX_NOTES:,} more kinds of rows"]


def source_notes(index: Index) -> list[str]:
    """Return the notes that conversions stored about their sources, each once."""
    distinct: dict[str, None] = {}
    for _, metadata in _with_entry(index, range(len(index.requests)), SOURCE):
        source = metadata.get(SOURCE)
        notes = source.get("notes") if isinstance(source, dict) else None
        if isinstance(notes, list):
            distinct |= dict.fromkeys(note for note in notes if isinstance(note, str))
    return list(distinct)


def _with_entry(index: Index, requests: Iterable[int], key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the requests whose metadata have `key`, and the metadata; others are not parsed."""
    quoted = json.dumps(key)
    for request in requests:
        if quoted in index.metadata[request]:
            metadata = index.request_metadata(request)
            if key in metadata:
                yield request, metadata


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
    interval = selector.interval
    if interval is not None and not interval.start_at_prompt and not interval.stop_at_prompt:
        return 0
    raise WeirError(
        f"request {index.requests[request][:80]!r} was stored without prompt_tokens, which "
        f"{selector.to_json()!r} counts from; use absolute positions",
        "positions",
    )
