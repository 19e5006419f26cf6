"""`RowStream`: shuffled rows of one site, for training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from vllm_weir.errors import WeirError, brief
from vllm_weir.storage.index import PLAIN, Index

PIECE = 256
"""Rows are read in pieces of this many consecutive ones, so that a file is not read byte by byte."""


class StreamedDataset(Protocol):
    """What a stream needs of an `ActivationDataset`."""

    @property
    def index(self) -> Index: ...

    def count(self, site: object) -> int: ...

    def runs_of(self, site: object, requests: Sequence[str] | str | None) -> np.ndarray: ...

    def ordered(self, runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...

    def read(self, which: np.ndarray, at: np.ndarray) -> torch.Tensor: ...


class RowStream(IterableDataset):
    """Every row of a site exactly once an epoch, in an order that follows from the seed and the epoch.

    Pieces of up to 256 consecutive rows are shuffled over the whole dataset, and rows within a buffer of `buffer_rows`.
    In DataLoader workers each serves a share of whole batches; shares are disjoint and together whole. Every pass over
    the object is `epochs` epochs, and goes on from the last one; workers start afresh with every pass over their
    DataLoader, so there call `set_epoch` before it, or pass `epochs`.

    ``len()`` is what a pass yields, with any number of workers; a stream without end has none. A DataLoader that makes
    the batches itself makes a short one for each worker, which its own length does not count.

    Args:
        dataset: from `load`.
        site: as for `ActivationDataset.rows`.
        shuffle: False: by request and position.
        seed: of the order.
        batch_size: rows in a batch; None for single rows [d], to be batched by a DataLoader.
        buffer_rows: rows that are mixed at a time; memory is about twice that.
        epochs: passes over the data; None for no end.
        labels: yield (rows, positions, token_ids, request_index) instead of rows.
        drop_last: leave out the last batch of an epoch if it is short, and rows that shares of `shard` would differ by.
        shard: (i, n): only the i-th of n shares, e.g. a rank of a distributed job. Shares are the same number of rows,
            or differ by one.

    Yields:
        float32 (or the stored dtype, where all rows are uncompressed and have one) [batch_size, d]; the last batch may
        be shorter.

    Raises:
        KeyError: for a site that is not there.
        WeirError: for options that are wrong, naming the field, and rows of several widths.
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
                raise WeirError(f"an int, at least {least}, got {value!r}", name)
        self.dataset, self.site = dataset, site
        self.shuffle, self.seed, self.batch_size, self.buffer_rows = shuffle, seed, batch_size, buffer_rows
        self.epochs, self.labels, self.drop_last, self.shard = epochs, labels, drop_last, _checked(shard)
        self.epoch = 0
        self.total = dataset.count(site)
        self._dtype = _dtype(dataset, site)

    def __len__(self) -> int:
        """Rows (or batches) of a pass over this share; TypeError if it has no end."""
        if self.epochs is None:
            raise TypeError("a stream without end (epochs=None) has no length")
        return self.epochs * self._steps

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next pass begins with."""
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
    def _span(self) -> tuple[int, int]:
        """(first, end): the rows of this share, in the order of an epoch."""
        mine, of = self.shard
        if self.drop_last:
            return mine * (self.total // of), (mine + 1) * (self.total // of)
        return mine * self.total // of, (mine + 1) * self.total // of

    @property
    def _steps(self) -> int:
        """Batches (or rows) of this share and an epoch."""
        (first, end), size = self._span, self.batch_size or 1
        return (end - first) // size if self.drop_last else -(-(end - first) // size)

    def _epoch(self, epoch: int, worker: int, workers: int) -> Iterator:
        """What one of the workers yields of this share."""
        index = self.dataset.index
        runs = self.dataset.runs_of(self.site, None)
        which, at = self.dataset.ordered(runs) if not self.shuffle else index.expand(runs)
        (first, end), size = self._span, self.batch_size or 1
        begin = first + size * (worker * self._steps // workers)
        end = min(first + size * ((worker + 1) * self._steps // workers), end)
        generator = np.random.default_rng([self.seed, epoch, self.shard[0] * workers + worker])
        left: list[np.ndarray] = []
        waiting = 0
        for piece in self._pieces(which, epoch, begin, end):
            left.append(piece)
            waiting += len(piece)
            if waiting >= max(self.buffer_rows, size):  # less would be shuffled for nothing
                rows = np.concatenate(left)
                keep = len(rows) % size  # so that only the last batch is short
                if self.shuffle:
                    generator.shuffle(rows)
                yield from self._batches(which, at, rows[: len(rows) - keep])
                left, waiting = [rows[len(rows) - keep :]], keep
        if waiting:
            rows = np.concatenate(left)
            if self.shuffle:
                generator.shuffle(rows)
            yield from self._batches(which, at, rows)

    def _pieces(self, which: np.ndarray, epoch: int, first: int, end: int) -> Iterator[np.ndarray]:
        """Rows `first` to `end` - 1 in the order of an epoch, int64, in pieces. `which`: of `Index.expand`."""
        # Pieces end where a run ends, so each is consecutive in its file.
        edges = np.flatnonzero(np.diff(which, prepend=-1, append=-1)) if len(which) else np.zeros(1, np.int64)
        begins = np.concatenate(
            [np.arange(a, b, PIECE) for a, b in itertools.pairwise(edges.tolist())] or [np.zeros(0, np.int64)]
        )
        ends = np.concatenate([begins[1:], [len(which)]]).astype(np.int64)
        order = np.arange(len(begins))
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(begins))
        reached = np.cumsum((ends - begins)[order])
        for i in range(int(np.searchsorted(reached, first, "right")), len(order)):
            start, stop = int(begins[order[i]]), int(ends[order[i]])
            before = int(reached[i]) - (stop - start)
            if before >= end:
                return
            yield np.arange(start + max(first - before, 0), stop - max(int(reached[i]) - end, 0))

    def _batches(self, which: np.ndarray, at: np.ndarray, rows: np.ndarray) -> Iterator:
        size = self.batch_size or 1
        # Read in the order of the files, then deal out in the shuffled one.
        order = np.argsort(rows, kind="stable")
        values = torch.empty(0)
        if len(rows):
            read = self.dataset.read(which[rows[order]], at[rows[order]]).to(self._dtype)
            values = torch.empty_like(read)
            values[torch.from_numpy(order)] = read
        index = self.dataset.index
        for begin in range(0, len(rows), size):
            some: slice | int = slice(begin, begin + size) if self.batch_size else begin
            batch = values[some].clone()
            if self.labels:
                w, a = which[rows[some]], at[rows[some]]
                yield (
                    batch, torch.as_tensor(index.positions[a]), torch.as_tensor(index.token_ids[a]),
                    torch.as_tensor(index.request[w]),
                )  # fmt: skip
            else:
                yield batch


def _checked(shard: object) -> tuple[int, int]:
    if isinstance(shard, (tuple, list)) and len(shard) == 2 and all(type(i) is int for i in shard):
        mine, of = shard
        if 0 <= mine < of:
            return mine, of
    raise WeirError(f"shard is (i, n) with 0 <= i < n, got {brief(shard)}", "shard")


def _dtype(dataset: StreamedDataset, site: object) -> torch.dtype:
    """The dtype of a site's rows, taken together; raises WeirError if they differ in width."""
    index = dataset.index
    runs = dataset.runs_of(site, None)
    runs = runs[index.rows[runs] > 0]
    headers = {block: index.blocks[block].header for block in np.unique(index.block[runs]).tolist()}
    widths = {header["d_model"] for header in headers.values()}
    if len(widths) > 1:
        own = np.array([headers[block]["d_model"] for block in index.block[runs].tolist()])
        raise index.uneven(runs, [(np.flatnonzero(own == width), width) for width in widths])
    found = {PLAIN[h["dtype"]] if h["method"] == "none" else torch.float32 for h in headers.values()}
    return found.pop() if len(found) == 1 else torch.float32
