"""Rows in parts: what a capture picks of a row, the widths in which workers send it, and how its shards are joined."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_weir.frontend.outputs.host_postprocess import join_shards, pick_values
from vllm_weir.frontend.receive.pending_sequence import TakenRows
from vllm_weir.schema.hooks import Site
from vllm_weir.schema.rows import WHOLE, RowPart, RowPick, RowShard, Shard, ShardWidths, ring_rows, row_width

Z, POST, PRE = Site("z", 1), Site("mlp_post", 1), Site("resid_pre", 1)
FIRST, SECOND = RowShard(Z, 0), RowShard(Z, 1)


@given(heads=st.integers(1, 9), d_head=st.integers(1, 8), data=st.data())
def test_the_pick_of_heads_is_torch_indexing(heads, d_head, data):
    chosen = data.draw(st.lists(st.integers(0, heads - 1), min_size=1, unique=True))
    rows = torch.randn(3, heads, d_head)
    pick = RowPick.of((heads, d_head), RowPart(heads=tuple(chosen)))
    (picked,) = pick_values(TakenRows([Z], np.arange(3), {Z: rows.flatten(1)}), {Z: pick}).rows.values()
    assert torch.equal(picked.unflatten(1, pick.shape), rows[:, chosen])
    assert pick.width == len(chosen) * d_head


def test_the_pick_of_neurons_and_of_everything():
    pick = RowPick.of((12,), RowPart(neurons=(5, 0)))
    assert pick == RowPick((12,), (5, 0)) and pick.shape == (2,)
    everything = RowPick.of((3, 4), WHOLE)
    assert everything == RowPick((3, 4), None) and everything.shape == (3, 4)


def test_widths_are_those_of_the_parts():
    shapes = {Z: (4, 8), POST: (100,), Site("q", 1): (2, 8)}
    shards = {POST: (Shard(0, 50), Shard(50, 100))}
    widths = ShardWidths(shapes, shards, 32)
    assert widths and Z not in widths and PRE not in widths, "a row of the ring's width comes as it is"
    assert list(widths.shards(POST)) == [(RowShard(POST, 0), 50), (RowShard(POST, 1), 50)]
    assert list(widths.shards(Site("q", 1))) == [(RowShard(Site("q", 1), 0), 16)]
    assert (widths.ring_rows(POST), widths.ring_rows(Z), widths.ring_rows(PRE)) == (2, 1, 1)
    assert not ShardWidths({Z: (4, 8)}, {}, 32)


@given(width=st.integers(1, 200), d_model=st.integers(1, 64))
def test_ring_rows_are_as_few_as_hold_the_row(width, d_model):
    rows = ring_rows(width, d_model)
    assert (rows - 1) * d_model < width <= rows * d_model
    assert row_width((width, 3)) == 3 * width


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
    part = lambda shard, at, columns: TakenRows([shard], np.array(at), {shard: whole[at, columns]})
    first = part(FIRST, [0, 1, 3], slice(4))
    (joined,) = join_shards([first, part(SECOND, [1, 2, 3], slice(4, 6))])
    assert joined.positions.tolist() == [1, 3] and torch.equal(joined.rows[Z], whole[[1, 3]])
    (nothing,) = join_shards([first, part(SECOND, [2], slice(4, 6))])
    assert not len(nothing.positions) and not nothing.rows


def test_rows_of_whole_sites_pass_as_they_are():
    taken = TakenRows([PRE], np.arange(2), {PRE: torch.randn(2, 4)})
    assert join_shards(whole := [taken]) is whole and pick_values(taken, {}) is taken
    assert pick_values(taken, {Z: RowPick((3, 2))}) is taken
