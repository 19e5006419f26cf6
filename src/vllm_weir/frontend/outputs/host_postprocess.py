"""What this process makes of rows as workers sent them: shards joined, values picked, postprocesses applied."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from vllm_weir import codec
from vllm_weir.frontend.receive.pending_sequence import PendingSequence, TakenRows
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.request import Postprocess
from vllm_weir.schema.rows import RowPick, RowShard


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


def apply_postprocess(
    postprocess: Postprocess,
    directions: Mapping[str, np.ndarray],
    positions: np.ndarray,
    row_count: int,
    rows: list[TakenRows],
) -> list[TakenRows]:
    """Compress, project or reduce rows that left the device as they are.

    `directions` are, by digest, those that `postprocess` names; of the `row_count` rows that each
    site should have some may be missing.
    """
    if postprocess.compression is not None:
        compression = postprocess.compression
        return _map_rows(rows, lambda tensor: codec.encode(tensor, compression))
    if postprocess.directions:
        matrix = torch.from_numpy(np.stack([directions[digest] for digest in postprocess.directions])).float()
        rows = _map_rows(rows, lambda tensor: tensor.float() @ matrix.T)
    return rows if postprocess.reduce is None else reduce_rows(postprocess.reduce, positions, rows, row_count)


def _map_rows(rows: list[TakenRows], function: Callable[[torch.Tensor], torch.Tensor]) -> list[TakenRows]:
    return [
        TakenRows(taken.sites, taken.positions, {site: function(tensor) for site, tensor in taken.rows.items()})
        for taken in rows
    ]


def reduce_rows(
    how: str,
    positions: np.ndarray,
    rows: list[TakenRows],
    row_count: int,
    reduced: Sequence[TakenRows] = (),
    reduced_count: int = 0,
) -> list[TakenRows]:
    """Reduce each site's rows to one.

    A site with a missing row has no result, since a reduction of some rows would pass for one of
    all rows.

    Args:
        how: one of `vllm_weir.schema.capture.REDUCTIONS`.
        positions: position of the results, int64 [1].
        rows: the rows, [n, k] of each site.
        row_count: rows that each site should have.
        reduced: what the worker has reduced earlier rows to, float32 [1, k] of each site.
        reduced_count: how many earlier rows those are.

    Returns:
        The sites with a result, float32 [1, k], and then those without.
    """
    sites = [site for taken in rows or reduced for site in taken.sites]
    complete = {
        site: tensor for taken in rows if len(taken.positions) == row_count for site, tensor in taken.rows.items()
    }
    earlier = {site: tensor for taken in reduced for site, tensor in taken.rows.items()}
    results: dict[Site, torch.Tensor] = {}
    for site in sites:
        site_rows, site_earlier = complete.get(site), earlier.get(site)
        rows_missing = row_count > 0 and site_rows is None
        earlier_missing = reduced_count > 0 and site_earlier is None
        if rows_missing or earlier_missing:
            continue
        result = site_earlier if site_rows is None else _reduce(how, site_rows.float(), site_earlier, reduced_count)
        if result is not None:
            results[site] = result
    without = [site for site in sites if site not in results]
    out = []
    if results:
        out.append(TakenRows(list(results), positions, results))
    if without:
        out.append(TakenRows(without, positions[:0], {}))
    return out


def _reduce(how: str, rows: torch.Tensor, earlier: torch.Tensor | None, earlier_count: int) -> torch.Tensor:
    """Reduce rows, float32 [n, k], and what `earlier_count` rows before them were reduced to."""
    if how == "last":
        return rows[-1:]
    if how == "max":
        largest = rows.amax(0, keepdim=True)
        return largest if earlier is None else torch.maximum(earlier, largest)
    if earlier is None:
        return rows.mean(0, keepdim=True)
    return (earlier * earlier_count + rows.sum(0, keepdim=True)) / (earlier_count + len(rows))
