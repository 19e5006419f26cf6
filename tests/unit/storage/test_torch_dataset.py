"""Shuffled streams: every row exactly once an epoch, with and without workers."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.unit.refusals import refused
from tests.unit.stored import WORKERS
from vllm_weir.errors import WeirError
from vllm_weir.storage import ActivationDataset, Batch, load, open_writer

SITE = ("resid_post", 1)
LENGTHS = [700, 1, 0, 300, 40, 959]
TOTAL = sum(LENGTHS)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> ActivationDataset:
    """Row i of all has the value i in its first column; half of them in another shard."""
    path = tmp_path_factory.mktemp("stream")
    begin = 0
    with open_writer(path, shard_bytes=4000) as writer:
        for request, n in enumerate(LENGTHS):
            for part in np.array_split(np.arange(n), 3):
                rows = torch.stack([torch.from_numpy(part + begin).float(), torch.full((len(part),), 7.0)], 1)
                writer.write(Batch(f"r{request}", *SITE, part, part, rows))
                writer.write(Batch(f"r{request}", "resid_pre", 1, part, part, -rows))
            writer.finish_request(f"r{request}")
            begin += n
    return load(path)


def ids(batches: object) -> list[int]:
    return [int(v) for batch in batches for v in batch.reshape(-1, 2)[:, 0]]  # type: ignore[attr-defined]


@pytest.mark.parametrize("buffer_rows", [1, 64, 5000])
@pytest.mark.parametrize("batch_size", [None, 1, 37])
def test_every_row_once_an_epoch(dataset: ActivationDataset, buffer_rows: int, batch_size: int | None) -> None:
    stream = dataset.torch(SITE, batch_size=batch_size, buffer_rows=buffer_rows, seed=3)
    first, second = list(stream), list(stream)
    assert sorted(ids(first)) == sorted(ids(second)) == list(range(TOTAL))
    assert ids(first) != ids(second)  # another epoch, another order
    assert len(stream) == len(first)
    if batch_size:
        assert {len(b) for b in first[:-1]} == {batch_size}
    again = dataset.torch(SITE, batch_size=batch_size, buffer_rows=buffer_rows, seed=3)
    assert ids(again) == ids(first)
    assert ids(dataset.torch(SITE, batch_size=batch_size, seed=4)) != ids(first)


def test_a_buffer_of_the_whole_site_mixes_it_all(dataset: ActivationDataset) -> None:
    order = np.array(ids(dataset.torch(SITE, batch_size=50, buffer_rows=TOTAL)))
    assert abs(np.corrcoef(order, np.arange(TOTAL))[0, 1]) < 0.1


def test_in_order(dataset: ActivationDataset) -> None:
    assert ids(dataset.torch(SITE, shuffle=False, batch_size=64)) == list(range(TOTAL))


def test_labels_belong_to_their_rows(dataset: ActivationDataset) -> None:
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    place = {name: i for i, name in enumerate(dataset.requests)}
    real = {place[f"r{i}"]: int(starts[i]) for i in range(len(LENGTHS)) if f"r{i}" in place}
    for rows, positions, tokens, requests in dataset.torch(SITE, batch_size=100, labels=True):
        assert (positions == tokens).all()
        assert [real[r] + p for r, p in zip(requests.tolist(), positions.tolist())] == rows[:, 0].int().tolist()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_share_single_rows(dataset: ActivationDataset) -> None:
    stream = dataset.torch(SITE, buffer_rows=100)
    singles = DataLoader(stream, batch_size=10, num_workers=2, multiprocessing_context=WORKERS)
    assert sorted(ids(singles)) == list(range(TOTAL))


def test_shares_of_ranks_are_disjoint_and_whole(dataset: ActivationDataset) -> None:
    shares = [ids(dataset.torch(SITE, batch_size=8, shard=(i, 3))) for i in range(3)]
    assert sorted(i for share in shares for i in share) == list(range(TOTAL))
    assert min(map(len, shares)) > 0


PASSES = list(itertools.product([0], [None, 37, 5000], [(0, 1), (1, 3)], [False, True]))
PASSES += [(3, 37, (0, 1), False), (3, 37, (1, 3), True), (2, 5000, (0, 1), False), (3, 5000, (1, 3), True)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create", "error:Length of IterableDataset")
@pytest.mark.parametrize(("workers", "batch_size", "shard", "drop_last"), PASSES)
def test_the_length_is_what_a_pass_yields(
    dataset: ActivationDataset, workers: int, batch_size: int | None, shard: tuple[int, int], drop_last: bool
) -> None:
    stream = dataset.torch(SITE, batch_size=batch_size, buffer_rows=100, epochs=2, shard=shard, drop_last=drop_last)
    loader = DataLoader(
        stream, batch_size=None, num_workers=workers, multiprocessing_context=WORKERS if workers else None
    )
    said = len(loader)  # and torch warns of more than that
    batches = list(loader)
    assert len(batches) == said == len(stream)
    if batch_size is not None:
        short = 0 if drop_last else 2  # one an epoch, however many workers there are
        assert sum(len(batch) < batch_size for batch in batches) <= short
    found, times = np.unique(ids(batches), return_counts=True)
    assert max(times, default=0) <= 2
    if shard == (0, 1) and not drop_last:
        assert found.tolist() == list(range(TOTAL)) and min(times) == 2


def test_a_stream_without_end_has_no_length(dataset: ActivationDataset) -> None:
    with pytest.raises(TypeError, match="endless stream"):
        len(dataset.torch(SITE, epochs=None))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world", [2, 3, 7, TOTAL + 1])
def test_ranks_differ_by_one_row_at_most_and_not_at_all_if_the_rest_is_dropped(
    dataset: ActivationDataset, world: int, shuffle: bool
) -> None:
    ranks = range(world) if world < 10 else (0, 1, 1000, world - 1)
    for epoch in range(2):
        for drop_last in (False, True):
            streams = [dataset.torch(SITE, shard=(i, world), drop_last=drop_last, shuffle=shuffle) for i in ranks]
            for stream in streams:
                stream.set_epoch(epoch)
            shares = [ids(stream) for stream in streams]
            sizes = set(map(len, shares))
            rows = [i for share in shares for i in share]
            assert sizes == {TOTAL // world} if drop_last else sizes <= {TOTAL // world, TOTAL // world + 1}
            assert len(set(rows)) == len(rows)
            if world < 10:
                assert len(rows) == (TOTAL // world * world if drop_last else TOTAL)


def test_rows_of_several_widths_are_refused(tmp_path: Path) -> None:
    """A batch of some of each failed in torch, or was of the one and then of the other."""
    with open_writer(tmp_path) as writer:
        for request, width in (("a", 2), ("b", 4), ("c", 4)):
            writer.write(Batch(request, *SITE, [0], [0], torch.ones(1, width)))
            writer.finish_request(request)
        writer.write(Batch("d", *SITE, [], [], torch.ones(0, 7)))
        writer.finish_request("d")
    with pytest.raises(WeirError, match=r"resid_post\[1\] differ in width .*: 2 \('a'\), 4 \('b' and 1 more\);"):
        load(tmp_path).torch(SITE)


def test_drop_last_and_endless(dataset: ActivationDataset) -> None:
    stream = dataset.torch(SITE, batch_size=300, drop_last=True)
    assert [len(b) for b in stream] == [300] * (TOTAL // 300) and len(stream) == TOTAL // 300
    endless = iter(dataset.torch(SITE, batch_size=1000, epochs=None))
    assert sum(len(next(endless)) for _ in range(5)) > TOTAL


@pytest.mark.parametrize(
    ("options", "field"),
    [({"batch_size": 0}, "batch_size"), ({"buffer_rows": 0}, "buffer_rows"), ({"epochs": 0}, "epochs"),
     ({"shard": (2, 2)}, "shard"), ({"shard": 1}, "shard"), ({"shard": None}, "shard"), ({"shard": (0, 1, 2)}, "shard"),
     ({"shard": "01"}, "shard"), ({"shard": (0.0, 2)}, "shard"), ({"seed": -1}, "seed")],
)  # fmt: skip
def test_bad_options(dataset: ActivationDataset, options: dict, field: str) -> None:
    with refused(field):
        dataset.torch(SITE, **options)


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_of_rows_stored_in_several_ways_are_all_of_one_dtype(shuffle: bool, tmp_path: Path) -> None:
    for name, compress in (("a", "full8"), ("b", None)):
        with open_writer(tmp_path, compress=compress) as writer:
            writer.write(Batch(name, *SITE, np.arange(300), np.arange(300), torch.ones(300, 4).bfloat16()))
            writer.finish_request(name)
    stream = load(tmp_path).torch(SITE, batch_size=50, buffer_rows=50, shuffle=shuffle)
    assert {batch.dtype for batch in stream} == {torch.float32}


def test_a_batch_larger_than_the_buffer_is_shuffled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each piece made it quadratic; a request of one row is a piece."""
    with open_writer(tmp_path) as writer:
        for i in range(500):
            writer.write(Batch(f"r{i}", *SITE, [0], [0], torch.full((1, 2), float(i))))
            writer.finish_request(f"r{i}")
    joined: list[int] = []
    concatenate = np.concatenate
    monkeypatch.setattr(
        np, "concatenate", lambda parts, *a, **k: joined.append(len(parts)) or concatenate(parts, *a, **k)
    )
    batches = list(load(tmp_path).torch(SITE, batch_size=200, buffer_rows=10))
    assert [len(b) for b in batches] == [200, 200, 100] and sorted(ids(batches)) == list(range(500))
    assert len([n for n in joined if n > 1]) < 100
