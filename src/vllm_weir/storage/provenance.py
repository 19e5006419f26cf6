"""What requests' metadata say about rows: how they were captured, and notes on their source."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.positions import Positions
from vllm_weir.schema.row_notes import KEY, entries_of, in_words, is_about
from vllm_weir.storage.index import Index

SOURCE = "source"
"""Key of the metadata under which a conversion stores the notes of its source."""
MAX_NOTES = 8
"""Kinds of rows that are listed one by one."""
UNPLACED = ("mean", "max")
"""Reductions whose row belongs to no single position; that of ``"last"`` does."""


def check_placed(index: Index, requests: Iterable[int], site: Site, selector: Positions) -> None:
    """Raise WeirError if rows of a site stand for several positions each."""
    for request, metadata in _with_entry(index, requests, KEY):
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
    for _, metadata in _with_entry(index, range(len(index.requests)), KEY):
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
