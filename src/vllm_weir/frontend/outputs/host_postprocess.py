"""Rows reduced, projected and compressed in the caller's process: what workers began, and all of it for late parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from vllm_weir import codec
from vllm_weir.frontend.receive.pending_sequence import TakenRows
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.request import Postprocess


def treated(
    postprocess: Postprocess,
    directions: Mapping[str, np.ndarray],
    at: np.ndarray,
    sources: np.ndarray,
    rows: list[TakenRows],
) -> list[TakenRows]:
    """What a late part's rows become.

    Args:
        directions: by digest.
        at: positions of the results.
        sources: positions of the rows that were asked for, of which some may be missing.
        rows: the rows, as they left the device.
    """
    if postprocess.compression is not None:
        compression = postprocess.compression
        return _each(rows, lambda one: codec.encode(one, compression))
    if postprocess.directions:
        matrix = torch.from_numpy(np.stack([directions[digest] for digest in postprocess.directions])).float()
        rows = _each(rows, lambda one: one.float() @ matrix.T)
    return rows if postprocess.reduce is None else reduced(postprocess.reduce, at, rows, [], len(sources))


def _each(rows: list[TakenRows], make: Callable[[torch.Tensor], torch.Tensor]) -> list[TakenRows]:
    return [TakenRows(t.sites, t.positions, {site: make(one) for site, one in t.rows.items()}) for t in rows]


def reduced(
    how: str, at: np.ndarray, rows: list[TakenRows], folds: list[TakenRows], count: int, folded: int = 0
) -> list[TakenRows]:
    """One row a site of its `count` rows [n, k], and of what `folded` earlier ones were reduced to ([1, k], float32);
    none for a site of which any is missing: less than all would pass for all."""
    sites = [site for taken in rows or folds for site in taken.sites]
    later = {site: part for taken in rows if len(taken.positions) == count for site, part in taken.rows.items()}
    earlier = {site: part for taken in folds for site, part in taken.rows.items()}
    out: dict[Site, torch.Tensor] = {}
    for site in sites:
        tail = later[site].float() if site in later else None
        head = earlier.get(site)
        if tail is None:
            if head is None or count:
                continue
            whole = head
        elif head is None:
            if folded:
                continue
            whole = {"last": tail[-1:], "max": tail.amax(0, True), "mean": tail.mean(0, True)}[how]
        elif how == "last":
            whole = tail[-1:]
        elif how == "max":
            whole = torch.maximum(head, tail.amax(0, keepdim=True))
        else:
            whole = (head * folded + tail.sum(0, keepdim=True)) / (folded + len(tail))
        out[site] = whole
    none = [site for site in sites if site not in out]
    return [
        TakenRows(some, at if some is not none else at[:0], {s: out[s] for s in some if s in out})
        for some in (list(out), none)
        if some
    ]
