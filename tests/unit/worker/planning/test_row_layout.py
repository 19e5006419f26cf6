"""How rows of other widths lie in the ring, which worker sends which part of them, and structured columns."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_weir.schema.hooks import Site
from vllm_weir.schema.rows import Shard
from vllm_weir.schema.taps import STAGES, column_of, num_columns, tap_of
from vllm_weir.worker.planning.arena import RowLayout
from vllm_weir.worker.planning.columns import RUN, SCORE_READ, SiteSets, as_integers, concatenate

D, LAYERS = 32, 2
Z, K, POST = Site("z", 1), Site("k", 1), Site("mlp_post", 0)
SHAPES = {Z: (8, 8), K: (2, 8), POST: (112,)}


def test_one_worker_holds_everything():
    layout = RowLayout.of(SHAPES, {}, D, LAYERS, 0, 1)
    assert layout.shards == {tap_of(Z): Shard(0, 64), tap_of(K): Shard(0, 16), tap_of(POST): Shard(0, 112)}
    assert not layout.spread and not layout.silent and not layout.reader_columns
    assert {layout.ring_rows.get(tap_of(site) * STAGES, 1) for site in (Z, K, POST)} == {2, 1, 4}


@pytest.mark.parametrize("rank", range(4))
def test_four_workers_hold_parts_and_copies(rank):
    """Four ranks, two key-value heads: each of these is on two ranks, of which one sends it."""
    kv = rank // 2
    shards = {
        Z: Shard(16 * rank, 16 * rank + 16),
        K: Shard(8 * kv, 8 * kv + 8),
        POST: Shard(28 * rank, 28 * rank + 28),
    }
    layout = RowLayout.of(SHAPES, shards, D, LAYERS, rank, 4)
    assert layout.spread == {tap_of(site) for site in shards}
    assert layout.silent == ({tap_of(K)} if rank % 2 else set())
    assert not layout.ring_rows, "every part fits a row of the ring"
    for site, part in ((Z, rank), (K, kv), (POST, rank)):
        column = column_of(site, False)
        assert layout.reader_columns.get(column, column) == column + part * num_columns(LAYERS)


def test_a_repeated_column_has_the_rank_of_its_first_place():
    sets = SiteSets(4, 12)
    assert sets.ranks.dtype == np.int32 and (sets.ranks == -1).all()
    number = sets.hold((2, 5, 5, 5, 7))
    assert sets.ranks[number].tolist() == [-1, -1, 0, -1, -1, 1, -1, 4, -1, -1, -1, -1]
    assert sets.columns_of[number] == (2, 5, 5, 5, 7)


@pytest.mark.parametrize("dtype", [RUN, SCORE_READ])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_integers_are_a_view(dtype, count):
    array = np.zeros(count, dtype)
    integers = as_integers(array)
    assert integers.shape == (count, len(dtype)) and integers.dtype == dtype[0]
    integers[:] = 7
    assert (array[dtype.names[0]] == 7).all()
    assert (integers + np.arange(len(dtype))).shape == integers.shape


def test_nothing_is_joined():
    assert concatenate([], RUN).shape == (0,)
    assert len(concatenate([np.zeros(2, RUN), np.zeros(0, RUN), np.zeros(1, RUN)], RUN)) == 3
