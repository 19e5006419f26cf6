"""What requests' metadata tell of a dataset's rows: how they were captured, and what their source's reader noted."""

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
"""Where a conversion leaves what its source's reader noted."""
MOST = 8
"""Kinds of rows that are told one by one."""
UNPLACED = ("mean", "max")
"""Reductions whose row is not the row of its position; ``"last"`` is."""


def check_placed(index: Index, requests: Iterable[int], site: Site, selector: Positions) -> None:
    """Raise WeirError if rows of a site that are to be chosen by position stand for several positions each."""
    for request, metadata in _telling(index, requests, KEY):
        for entry in entries_of(metadata):
            if is_about(entry, site) and entry.get("reduce") in UNPLACED:
                raise WeirError(
                    f"the row of {site} of request {index.requests[request][:80]!r} is the {entry['reduce']} over "
                    f"positions {entry.get('positions', 'all')!r}, so {brief(selector.to_json())} cannot choose it; "
                    "leave positions out, or leave such requests out",
                    "positions",
                )


def capture_notes(index: Index) -> list[str]:
    """A line for every kind of rows that are not simply those of all positions."""
    found: Counter[str] = Counter()
    for _, metadata in _telling(index, range(len(index.requests)), KEY):
        found.update({json.dumps(entry, sort_keys=True) for entry in entries_of(metadata)})
    out = [
        f"{in_words(json.loads(text))} ({times:,} request{'s'[: times != 1]})" for text, times in found.most_common()
    ]
    return [*out[:MOST], f"and {len(out) - MOST:,} more kinds of rows"] if len(out) > MOST else out


def source_notes(index: Index) -> list[str]:
    """What a conversion took over from its source's reader, each note once."""
    out: dict[str, None] = {}
    for _, metadata in _telling(index, range(len(index.requests)), SOURCE):
        source = metadata.get(SOURCE)
        notes = source.get("notes") if isinstance(source, dict) else None
        out |= dict.fromkeys(note for note in notes if isinstance(note, str)) if isinstance(notes, list) else {}
    return list(out)


def _telling(index: Index, requests: Iterable[int], key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Requests whose metadata have an entry, and these; texts without its name are not parsed."""
    quoted = json.dumps(key)
    for request in requests:
        if quoted in index.metadata[request]:
            metadata = index.describe(request)
            if key in metadata:
                yield request, metadata
