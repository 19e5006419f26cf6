"""Reductions, projections and compression of rows in the caller's process.

Workers reduce the prompt's rows, and the rows of generated tokens are added here. If a request's
captures want different things, workers send the rows as they are and everything is done here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from vllm_weir import codec
from vllm_weir.frontend.receive.pending_sequence import TakenRows
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.request import Postprocess


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
