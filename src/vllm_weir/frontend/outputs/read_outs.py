"""Read-outs in the caller's process: the workers' records as tensors, or read here off whole rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from vllm_weir.frontend.admission.read_outs import AskedReadOut
from vllm_weir.frontend.receive.pending_sequence import TakenRows
from vllm_weir.results.activations import Activations
from vllm_weir.results.read_outs import FeatureValues, LensReadings, LensTokens, ReadValues, lenses_of, nested
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.read_outs import ITEM, ReadOut, RecordLayout
from vllm_weir.util.token_texts import SequenceTexts

Values = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Positions int64 [n], ids int64 [n, k] and values float32 [n, k]."""


def collect(values: Mapping[AskedReadOut, Values], texts: SequenceTexts) -> ReadValues:
    """Return what was read, by name; `texts` are those of the sequence's tokens."""
    features = {
        (one.name, one.read_out.site.layer if one.by_layer else None): FeatureValues(*values[one], texts)
        for one in values
        if one.sae is not None
    }
    lenses: dict[str, LensReadings] = {}
    for one in values:
        if one.sae is None:
            tokens = LensTokens(*values[one], texts)
            lenses.setdefault(one.name, LensReadings())[one.read_out.site.layer] = tokens
    return ReadValues(nested(features), lenses_of(lenses))


def from_records(
    asked: Sequence[AskedReadOut],
    wanted: Callable[[AskedReadOut], np.ndarray],
    take: Callable[[Sequence[Site], np.ndarray], list[TakenRows]],
    row_bytes: int,
) -> dict[AskedReadOut, Values]:
    """Return what workers have read.

    Args:
        asked: all read-outs of the request that workers read, which determine the layout of its records.
        wanted: returns the positions of one.
        take: (sites, positions) -> their records.
        row_bytes: of the row that begins a record; 0 if it has none.
    """
    layout = RecordLayout.of((one.read_out for one in asked), row_bytes)
    by_positions: dict[object, list[AskedReadOut]] = {}
    for one in asked:
        by_positions.setdefault(one.positions, []).append(one)
    found: dict[AskedReadOut, Values] = {}
    for some in by_positions.values():
        positions = wanted(some[0])
        sites = tuple(dict.fromkeys(one.read_out.site for one in some))
        for taken in take(sites, positions):
            for one in some:
                if one.read_out.site in taken.sites:
                    records = taken.rows.get(one.read_out.site)
                    offset = layout.offsets[one.read_out]
                    found[one] = (torch.from_numpy(taken.positions), *_of_records(one.read_out, records, offset))
    return {one: found[one] for one in asked}


def from_rows(
    asked: Sequence[AskedReadOut], wanted: Callable[[AskedReadOut], np.ndarray], rows: Activations
) -> dict[AskedReadOut, Values]:
    """Read features off rows in this process; `wanted` returns the positions of a read-out."""
    found: dict[AskedReadOut, Values] = {}
    for one in asked:
        site = one.read_out.site
        positions = rows.positions_of(site)
        here = torch.from_numpy(np.isin(positions.numpy(), wanted(one)))
        found[one] = (positions[here], *_of_rows(one, rows[site][here]))
    return found


def _of_records(read_out: ReadOut, records: torch.Tensor | None, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids and values of a site's records, uint8 [n, bytes]; None stands for no records."""
    width = read_out.width
    if records is None:
        return torch.empty(0, width, dtype=torch.int64), torch.empty(0, width)

    def part(start: int, dtype: torch.dtype) -> torch.Tensor:
        return records[:, start : start + ITEM * width].contiguous().view(dtype)

    if read_out.ids:
        return torch.tensor(read_out.ids).expand(len(records), width), part(offset, torch.float32)
    return part(offset, torch.int32).long(), part(offset + ITEM * width, torch.float32)


def _of_rows(asked: AskedReadOut, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids and values of an autoencoder's features on rows."""
    sae, read_out = asked.sae, asked.read_out
    assert sae is not None, "a lens is read on the workers"
    if not len(rows):
        return _of_records(read_out, None, 0)
    if not read_out.ids:
        return sae.top(rows, read_out.top_k)
    ids = torch.tensor(read_out.ids)
    return ids.expand(len(rows), -1), sae.chosen(rows, ids)
