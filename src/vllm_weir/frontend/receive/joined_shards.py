"""Rows that come in parts of their own width, joined to whole rows."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from vllm_weir.frontend.receive.pending_sequence import PendingSequence, TakenRows
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.row_shards import RowPick, RowShard


def sources_of(pending: PendingSequence, sites: Sequence[Site]) -> Sequence[Site | RowShard]:
    """Return what to take for the rows of these sites: the sites themselves, or parts of their rows."""
    widths = pending.admitted.widths
    if not widths or not any(site in widths for site in sites):
        return sites
    sources: list[Site | RowShard] = []
    for site in sites:
        sources.extend([part for part, _ in widths.shards(site)] if site in widths else [site])
    return sources


def join_shards(taken: list[TakenRows]) -> list[TakenRows]:
    """Return rows of whole sites.

    Args:
        taken: rows of sites, [n, d_model], and of parts, [n, width of the part]. Parts of one site
            may have different positions, if workers had no room for some rows.
    """
    if not any(isinstance(source, RowShard) for one in taken for source in one.sites):
        return taken
    whole: list[TakenRows] = []
    parts: dict[Site, dict[int, tuple[np.ndarray, torch.Tensor | None]]] = {}
    for one in taken:
        sites = [source for source in one.sites if not isinstance(source, RowShard)]
        if sites:
            whole.append(TakenRows(sites, one.positions, {site: one.rows[site] for site in sites if one.rows}))
        for source in one.sites:
            if isinstance(source, RowShard):
                parts.setdefault(source.site, {})[source.shard] = one.positions, one.rows.get(source)
    return whole + [_joined(site, [shards[k] for k in sorted(shards)]) for site, shards in parts.items()]


def pick_values(taken: TakenRows, picks: Mapping[Site, RowPick]) -> TakenRows:
    """Return rows, still flat, with those values of each that are wanted."""
    if all(pick.chosen is None for pick in map(picks.get, taken.sites) if pick is not None):
        return taken
    picked = {}
    for site, rows in taken.rows.items():
        pick = picks.get(site)
        if pick is not None and pick.chosen is not None:
            rows = rows.unflatten(1, pick.whole)[:, list(pick.chosen)].flatten(1)
        picked[site] = rows
    return TakenRows(taken.sites, taken.positions, picked)


def _joined(site: Site, parts: Sequence[tuple[np.ndarray, torch.Tensor | None]]) -> TakenRows:
    """Return a site's rows at the positions at which all its parts are there."""
    positions = functools.reduce(np.intersect1d, (positions for positions, _ in parts))
    here = [
        rows if len(own) == len(positions) else rows[torch.from_numpy(np.isin(own, positions))]
        for own, rows in parts
        if rows is not None
    ]
    if not len(positions):
        return TakenRows([site], positions, {})
    return TakenRows([site], positions, {site: here[0] if len(here) == 1 else torch.cat(here, 1)})
