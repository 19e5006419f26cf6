"""Rows that come in parts are joined where all their parts are there."""

from __future__ import annotations

import numpy as np
import torch

from vllm_weir.frontend.receive.joined_shards import join_shards, pick_values
from vllm_weir.frontend.receive.pending_sequence import TakenRows
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.row_shards import RowPick, RowShard

Z, PRE = Site("z", 1), Site("resid_pre", 1)
FIRST, SECOND = RowShard(Z, 0), RowShard(Z, 1)


def test_parts_are_put_side_by_side_in_the_order_of_their_columns():
    at, whole, pre = np.arange(3), torch.randn(3, 6), torch.randn(3, 4)
    taken = [
        TakenRows([SECOND], at, {SECOND: whole[:, 4:]}),
        TakenRows([PRE, FIRST], at, {PRE: pre, FIRST: whole[:, :4]}),
    ]
    by_site = {site: rows.rows[site] for rows in join_shards(taken) for site in rows.sites}
    assert list(by_site) == [PRE, Z]
    assert torch.equal(by_site[Z], whole) and torch.equal(by_site[PRE], pre)


def test_a_row_of_which_a_worker_dropped_a_part_is_missing():
    whole = torch.randn(4, 6)
    taken = [
        TakenRows([FIRST], np.array([0, 1, 3]), {FIRST: whole[[0, 1, 3], :4]}),
        TakenRows([SECOND], np.array([1, 2, 3]), {SECOND: whole[[1, 2, 3], 4:]}),
    ]
    (joined,) = join_shards(taken)
    assert joined.positions.tolist() == [1, 3] and torch.equal(joined.rows[Z], whole[[1, 3]])
    (nothing,) = join_shards([taken[0], TakenRows([SECOND], np.array([2]), {SECOND: whole[[2], 4:]})])
    assert not len(nothing.positions) and not nothing.rows


def test_rows_of_whole_sites_pass_as_they_are():
    taken = [TakenRows([PRE], np.arange(2), {PRE: torch.randn(2, 4)})]
    assert join_shards(taken) is taken


def test_values_are_picked_of_flat_rows():
    rows = torch.randn(2, 6)
    (pre,) = [torch.randn(2, 4)]
    taken = TakenRows([Z, PRE], np.arange(2), {Z: rows, PRE: pre})
    picked = pick_values(taken, {Z: RowPick((3, 2), (2, 0))})
    assert torch.equal(picked.rows[Z], rows[:, [4, 5, 0, 1]]) and picked.rows[PRE] is pre
    assert pick_values(taken, {Z: RowPick((3, 2))}) is taken
