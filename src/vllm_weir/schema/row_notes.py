"""Notes in a request's metadata: how its rows differ from plain rows of all positions."""

from __future__ import annotations

from typing import Any

from vllm_weir.schema.capture import Capture
from vllm_weir.schema.hooks import MODEL_HOOKS, Site
from vllm_weir.schema.positions import Positions

KEY = "capture"
"""The metadata's key for these notes."""
MOST_NUMBERS = 64
"""Of longer lists only the length is noted, to keep metadata small."""


def describe_rows(capture: Capture, directions: int = 0) -> dict[str, Any] | None:
    """Return a note on a capture's rows; None if they are the plain rows of all positions.

    A note has the form of `Capture.to_json`, except that ``project`` is the number of directions,
    and ``positions``, ``heads`` and ``neurons`` that list more than `MOST_NUMBERS` are a short text.
    """
    note: dict[str, Any] = {}
    if capture.before:
        note["before"] = True
    if capture.reduce is not None:
        note["reduce"] = capture.reduce
    if directions:
        note["project"] = directions
    for name, picked in capture.part.to_json().items():
        note[name] = picked if len(picked) <= MOST_NUMBERS else f"{len(picked)} listed ones"
    # Plain rows carry their positions, a reduced one does not: "prompt" must be noted then.
    unremarkable = ("all",) if capture.reduce is not None else ("all", "prompt")
    if capture.positions.kind not in unremarkable:
        note["positions"] = _short(capture.positions)
    if not note:
        return None
    return {"hook": capture.hook, "layers": "all" if capture.layers == "all" else list(capture.layers), **note}


def entries_of(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the notes in a request's metadata, without entries that are not Weir's."""
    entries = metadata.get(KEY)
    if not isinstance(entries, list):
        return []
    return [e for e in entries if isinstance(e, dict) and isinstance(e.get("hook"), str) and _has_layers(e)]


def is_about(entry: dict[str, Any], site: Site) -> bool:
    """Return whether a note is about this site's rows."""
    if entry["hook"] != site.hook:
        return False
    return site.hook in MODEL_HOOKS or entry["layers"] == "all" or site.layer in entry["layers"]


def in_words(entry: dict[str, Any]) -> str:
    """Describe a note in words: ``resid_post[3]: one row a request, reduced (mean) over positions 'prompt'``."""
    positions, reduce, directions = entry.get("positions", "all"), entry.get("reduce"), entry.get("project")
    parts = []
    if reduce:
        parts.append(f"one row a request, reduced ({reduce}) over positions {positions!r}")
    elif positions != "all":
        parts.append(f"only positions {positions!r}")
    if directions:
        parts.append(f"dot products with {directions} direction{'s' if directions != 1 else ''} instead of rows")
    for name in ("heads", "neurons"):
        if picked := entry.get(name):
            parts.append(f"only {name} {', '.join(map(str, picked)) if isinstance(picked, list) else picked}")
    if entry.get("before"):
        parts.append("from before the request's interventions")
    return f"{_place(entry)}: {'; '.join(parts)}"


def _short(positions: Positions) -> Any:
    if len(positions.values) <= MOST_NUMBERS:
        return positions.to_json()
    if not positions.needs_token_ids:
        return f"{len(positions.values)} listed ones"
    return f"{'all but ' if positions.kind == 'not_token_ids' else ''}{len(positions.values)} token ids"


def _has_layers(entry: dict[str, Any]) -> bool:
    layers = entry.get("layers")
    return layers == "all" or (isinstance(layers, list) and bool(layers))


def _place(entry: dict[str, Any]) -> str:
    if entry["hook"] in MODEL_HOOKS:
        return str(entry["hook"])
    return f"{entry['hook']}[{'all' if entry['layers'] == 'all' else ', '.join(map(str, entry['layers']))}]"
