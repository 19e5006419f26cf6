"""`RowStream`: shuffled rows of one site, as a torch dataset for training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.compression import header_shape
from vllm_weir.storage.index import UNCOMPRESSED_DTYPES, Index

PIECE_ROWS = 256
"""Rows are shuffled in pieces of this many consecutive ones, so that reads are not one row each."""


class StreamedDataset(Protocol):
    """The part of an `ActivationDataset` that a stream uses."""

    @property
    def index(self) -> Index: ...

    def count(self, site: object) -> int: ...

    def runs_of(self, site: object, requests: Sequence[str] | str | None) -> np.ndarray: ...

    def ordered(self, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of runs, ordered by request and position."""
        ...

    def read(self, row_runs: np.ndarray, row_ids: np.ndarray) -> torch.Tensor: ...


class RowStream(IterableDataset):
    """A stream of every row of a site, once an epoch, in an order fixed by seed and epoch.

    Pieces of up to 256 consecutive rows are shuffled over the whole dataset, and rows within a
    buffer of `buffer_rows`. Each DataLoader worker serves a share of whole batches; shares are
    disjoint and together complete. A pass over the object is `epochs` epochs and continues after
    the last one. Workers start over with every pass over their DataLoader, so there call
    `set_epoch` before each pass, or pass `epochs`.

    ``len()`` is what a pass yields, with any number of workers; an endless stream has none. A
    DataLoader that makes the batches itself makes a short one for each worker, which its own length
    does not count.

    Args:
        dataset: From `load`.
        site: As for `ActivationDataset.rows`.
        shuffle: False for the order by request and position.
        seed: Seed of the order.
        batch_size: Rows in a batch; None for single rows [d], to be batched by a DataLoader. (Rows of
            points that have one for each head are [heads, d_head].)
        buffer_rows: Rows that are shuffled at a time; they take about twice their size in memory.
        epochs: Passes over the data; None for an endless stream.
        labels: Yield (rows, positions, token_ids, request_index) instead of rows.
        drop_last: Leave out the last batch of an epoch if it is short, and rows that would make the
            shares of `shard` differ.
        shard: (i, n) for only the i-th of n shares, as for a rank of a distributed job. Shares have
            the same number of rows, or differ by one.

    Yields:
        Tensor [batch_size, d], float32 (or the stored dtype, if all rows are uncompressed and have
        the same); the last batch may be shorter.

    Raises:
        KeyError: For a site that is not there.
        WeirError: For a wrong option, naming the field, and for rows of several widths.
    """

    def __init__(
        self, dataset: StreamedDataset, site: object, *, shuffle: bool = True, seed: int = 0,
        batch_size: int | None = None, buffer_rows: int = 65_536, epochs: int | None = 1, labels: bool = False,
        drop_last: bool = False, shard: tuple[int, int] = (0, 1),
    ) -> None:  # fmt: skip
        for name, value, least in (
            ("batch_size", batch_size, 1), ("buffer_rows", buffer_rows, 1), ("epochs", epochs, 1), ("seed", seed, 0),
        ):  # fmt: skip
            optional = name in ("batch_size", "epochs")
            if not (value is None and optional) and (type(value) is not int or value < least):
                raise WeirError(f"expected an int, at least {least}, got {value!r}", name)
        self.dataset, self.site = dataset, site
        self.shuffle, self.seed, self.batch_size, self.buffer_rows = shuffle, seed, batch_size, buffer_rows
        self.epochs, self.labels, self.drop_last, self.shard = epochs, labels, drop_last, _checked_shard(shard)
        self.epoch = 0
        self.total = dataset.count(site)
        self._dtype = _row_dtype(dataset, site)

    def __len__(self) -> int:
        """Return the batches (or rows) of a pass; raise TypeError for an endless stream."""
        if self.epochs is None:
            raise TypeError("an endless stream (epochs=None) has no length")
        return self.epochs * self._epoch_batches

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        first = self.epoch
        passes = 0
        while self.epochs is None or passes < self.epochs:
            yield from self._epoch(first + passes, worker, workers)
            passes += 1
            self.epoch = first + passes

    @property
    def _share_rows(self) -> tuple[int, int]:
        """First row and end of this share, in the order of an epoch."""
        share, shares = self.shard
        if self.drop_last:
            return share * (self.total // shares), (share + 1) * (self.total // shares)
        return share * self.total // shares, (share + 1) * self.total // shares

    @property
    def _epoch_batches(self) -> int:
        (first, end), size = self._share_rows, self.batch_size or 1
        return (end - first) // size if self.drop_last else -(-(end - first) // size)

    def _epoch(self, epoch: int, worker: int, workers: int) -> Iterator:
        """Yield the part of this share that one DataLoader worker serves."""
        index = self.dataset.index
        runs = self.dataset.runs_of(self.site, None)
        row_runs, row_ids = index.expand(runs) if self.shuffle else self.dataset.ordered(runs)
        (first, end), size = self._share_rows, self.batch_size or 1
        start = first + size * (worker * self._epoch_batches // workers)
        end = min(first + size * ((worker + 1) * self._epoch_batches // workers), end)
        generator = np.random.default_rng([self.seed, epoch, self.shard[0] * workers + worker])
        buffer: list[np.ndarray] = []
        buffered = 0
        for piece in self._pieces(row_runs, epoch, start, end):
            buffer.append(piece)
            buffered += len(piece)
            if buffered >= max(self.buffer_rows, size):
                rows = np.concatenate(buffer)
                keep = len(rows) % size  # so that only the last batch is short
                if self.shuffle:
                    generator.shuffle(rows)
                yield from self._batches(row_runs, row_ids, rows[: len(rows) - keep])
                buffer, buffered = [rows[len(rows) - keep :]], keep
        if buffered:
            rows = np.concatenate(buffer)
            if self.shuffle:
                generator.shuffle(rows)
            yield from self._batches(row_runs, row_ids, rows)

    def _pieces(self, row_runs: np.ndarray, epoch: int, first: int, end: int) -> Iterator[np.ndarray]:
        """Yield rows `first` to `end` - 1 of an epoch, as indices into `row_runs`: int64."""
        # Pieces end where a run ends, so each is consecutive in its file.
        edges = np.flatnonzero(np.diff(row_runs, prepend=-1, append=-1)) if len(row_runs) else np.zeros(1, np.int64)
        starts = np.concatenate(
            [np.arange(a, b, PIECE_ROWS) for a, b in itertools.pairwise(edges.tolist())] or [np.zeros(0, np.int64)]
        )
        ends = np.concatenate([starts[1:], [len(row_runs)]]).astype(np.int64)
        order = np.arange(len(starts))
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(starts))
        rows_through = np.cumsum((ends - starts)[order])
        for i in range(int(np.searchsorted(rows_through, first, "right")), len(order)):
            start, stop = int(starts[order[i]]), int(ends[order[i]])
            rows_before = int(rows_through[i]) - (stop - start)
            if rows_before >= end:
                return
            yield np.arange(start + max(first - rows_before, 0), stop - max(int(rows_through[i]) - end, 0))

    def _batches(self, row_runs: np.ndarray, row_ids: np.ndarray, rows: np.ndarray) -> Iterator:
        """Read rows in the order of the files, and yield them in batches in the given order."""
        size = self.batch_size or 1
        order = np.argsort(rows, kind="stable")
        values = torch.empty(0)
        if len(rows):
            read = self.dataset.read(row_runs[rows[order]], row_ids[rows[order]]).to(self._dtype)
            values = torch.empty_like(read)
            values[torch.from_numpy(order)] = read
        index = self.dataset.index
        for start in range(0, len(rows), size):
            chosen: slice | int = slice(start, start + size) if self.batch_size else start
            batch = values[chosen].clone()
            if self.labels:
                runs, ids = row_runs[rows[chosen]], row_ids[rows[chosen]]
                yield (
                    batch, torch.as_tensor(index.positions[ids]), torch.as_tensor(index.token_ids[ids]),
                    torch.as_tensor(index.run_request[runs]),
                )  # fmt: skip
            else:
                yield batch


def _checked_shard(shard: object) -> tuple[int, int]:
    if isinstance(shard, (tuple, list)) and len(shard) == 2 and all(type(i) is int for i in shard):
        share, shares = shard
        if 0 <= share < shares:
            return share, shares
    raise WeirError(f"shard is (i, n) with 0 <= i < n, got {brief(shard)}", "shard")


def _row_dtype(dataset: StreamedDataset, site: object) -> torch.dtype:
    """Return the common dtype of a site's rows; raise WeirError if they differ in width."""
    index = dataset.index
    runs = dataset.runs_of(site, None)
    runs = runs[index.run_rows[runs] > 0]
    headers = {block: index.blocks[block].header for block in np.unique(index.run_block[runs]).tolist()}
    if len({header_shape(header) for header in headers.values()}) > 1:
        by_block = [(np.flatnonzero(index.run_block[runs] == block), header_shape(h)) for block, h in headers.items()]
        raise index.width_error(runs, by_block)
    dtypes = {UNCOMPRESSED_DTYPES[h["dtype"]] if h["method"] == "none" else torch.float32 for h in headers.values()}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32
