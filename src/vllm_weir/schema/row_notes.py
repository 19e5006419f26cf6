"""What captured rows are where they are not the rows of all positions: what datasets keep beside them."""

from __future__ import annotations

from typing import Any

from vllm_weir.schema.capture import Capture
from vllm_weir.schema.hooks import MODEL_HOOKS, Site
from vllm_weir.schema.positions import Positions

KEY = "capture"
"""Of a request's metadata."""
MOST_NUMBERS = 64
"""Selectors that list more are only counted: they would stand in the metadata of every request."""


def describe_rows(capture: Capture, directions: int = 0) -> dict[str, Any] | None:
    """An entry for rows that are reduced, projected, from before interventions, or of some positions; else None.

    It has the form of `Capture.to_json`, but for ``project``, which is the number of directions, and for ``positions``
    that list more than MOST_NUMBERS. All positions of a prompt (and its generated tokens) are not told.
    """
    out: dict[str, Any] = {}
    if capture.before:
        out["before"] = True
    if capture.reduce is not None:
        out["reduce"] = capture.reduce
    if directions:
        out["project"] = directions
    # What a row was reduced over is told in any case: nothing else says it.
    if capture.positions.kind not in (("all",) if capture.reduce is not None else ("all", "prompt")):
        out["positions"] = _short(capture.positions)
    if not out:
        return None
    return {"hook": capture.hook, "layers": "all" if capture.layers == "all" else list(capture.layers), **out}


def entries_of(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries in a request's metadata; what is of another form is the writer's own, and none."""
    found = metadata.get(KEY)
    if not isinstance(found, list):
        return []
    return [one for one in found if isinstance(one, dict) and isinstance(one.get("hook"), str) and _layers(one)]


def is_about(entry: dict[str, Any], site: Site) -> bool:
    """Whether an entry tells of this site's rows."""
    if entry["hook"] != site.hook:
        return False
    return site.hook in MODEL_HOOKS or entry["layers"] == "all" or site.layer in entry["layers"]


def in_words(entry: dict[str, Any]) -> str:
    """An entry for people, e.g. ``resid_post[3]: one row a request, its mean over positions 'prompt'``."""
    positions, reduce, directions = entry.get("positions", "all"), entry.get("reduce"), entry.get("project")
    what = []
    if reduce:
        what.append(f"one row a request, reduced ({reduce}) over positions {positions!r}")
    elif positions != "all":
        what.append(f"only positions {positions!r}")
    if directions:
        what.append(f"dot products with {directions} direction{'s' if directions != 1 else ''} instead of rows")
    if entry.get("before"):
        what.append("from before the request's interventions")
    return f"{_place(entry)}: {'; '.join(what)}"


def _short(positions: Positions) -> Any:
    if len(positions.values) <= MOST_NUMBERS:
        return positions.to_json()
    if not positions.needs_token_ids:
        return f"{len(positions.values)} listed ones"
    return f"{'all but ' if positions.kind == 'not_token_ids' else ''}{len(positions.values)} token ids"


def _layers(entry: dict[str, Any]) -> bool:
    layers = entry.get("layers")
    return layers == "all" or (isinstance(layers, list) and bool(layers))


def _place(entry: dict[str, Any]) -> str:
    if entry["hook"] in MODEL_HOOKS:
        return str(entry["hook"])
    return f"{entry['hook']}[{'all' if entry['layers'] == 'all' else ', '.join(map(str, entry['layers']))}]"
