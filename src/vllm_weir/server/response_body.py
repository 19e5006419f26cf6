"""A sequence's rows as the JSON object ``weir`` of its choice. Pure: where large results go is handed in."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from vllm_weir.errors import WeirError
from vllm_weir.frontend.outputs.view import OutputView
from vllm_weir.results.activations import Activations
from vllm_weir.schema.hooks import Site

NOTHING: AbstractContextManager = nullcontext()
Keep = Callable[[Activations, int], dict[str, Any]]
"""Puts away rows of so many bytes and says how they are fetched: {"id", "url", "expires_in"}; or raises WeirError."""


def whole(view: OutputView) -> OutputView:
    """A view of all of its sequence's rows, also where outputs carry only what is new."""
    return view if view.start == 0 else view.with_start(0)


def answer(
    view: OutputView, inline_bytes: int, keep: Keep, rows: bool = True, work: AbstractContextManager = NOTHING
) -> dict[str, Any]:
    """The object for one finished sequence; waits for its rows.

    Args:
        view: all of its rows, see `whole`.
        inline_bytes: results of at most this many bytes are put in; larger ones are given to `keep`.
        rows: False leaves rows out (they go with the answer in another form).
        work: entered for what keeps the interpreter; not while `keep` is called.

    Raises:
        WeirError: if rows were lost.
    """
    view.wait()
    with work:
        out: dict[str, Any] = {"receipt": view.receipt().to_dict()}
        acts = view.activations()
        if projects(view):
            out["scores"] = scores(acts)
            return out
        if not rows or not acts.sites:
            return out
        size, data = _inline(acts, inline_bytes)
    found = out["activations"] = {"sites": [name(site) for site in acts.sites], "format": "safetensors", "bytes": size}
    if data is not None:
        found["b64"] = base64.b64encode(data).decode("ascii")
        return out
    try:
        found |= keep(acts, size)
    except WeirError as e:
        found["error"] = e.message
    return out


def projects(view: OutputView) -> bool:
    """Whether the sequence's captures give scores instead of rows."""
    postprocess = view.part.spec.postprocess
    return bool(view.part.spec.site_requests) and postprocess is not None and bool(postprocess.directions)


def new_scores(view: OutputView, start: int) -> dict[str, Any] | None:
    """Scores at positions from `start` on, or None if there are none; waits for them."""
    acts = view.with_start(start).activations()
    return scores(acts) if any(acts.count(site) for site in acts.sites) else None


def scores(acts: Activations) -> dict[str, Any]:
    """Scores by site with their positions and tokens; one that is not finite is null."""
    out: dict[str, Any] = {"sites": {name(site): _floats(acts[site]) for site in acts.sites}}
    try:
        at, ids = acts.positions.tolist(), acts.token_ids.tolist()
        return {"positions": at, "token_ids": ids, **out}
    except WeirError:  # the sites have different rows
        out["positions_of"] = {name(s): acts.positions_of(*s).tolist() for s in acts.sites}
        out["token_ids_of"] = {name(s): acts.token_ids_of(*s).tolist() for s in acts.sites}
        return out


def name(site: Site) -> str:
    """``resid_post.10``."""
    return f"{site.hook}.{site.layer}"


def size_of(acts: Activations) -> int:
    """Bytes of the rows alone."""
    return sum(acts[site].nbytes for site in acts.sites)


def _floats(rows: torch.Tensor) -> list[list[float | None]]:
    values = rows.float().tolist()
    if bool(torch.isfinite(rows).all()):
        return values
    return [[v if math.isfinite(v) else None for v in row] for row in values]


def _inline(acts: Activations, inline_bytes: int) -> tuple[int, bytes | None]:
    """(bytes, what goes inline, if it does)."""
    size = size_of(acts)
    if size > inline_bytes:
        return size, None
    data = acts.to_bytes()
    return len(data), data if len(data) <= inline_bytes else None
