"""`RowStream`: shuffled rows of one site, for training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from vllm_weir.errors import WeirError
from vllm_weir.keep.dataset import PLAIN, ActivationDataset

PIECE = 256
"""Rows are read in pieces of this many consecutive ones, so that a file is not read byte by byte."""


class RowStream(IterableDataset):
    """Every row of a site exactly once an epoch, in an order that follows from the seed and the epoch.

    Pieces of up to 256 consecutive rows are shuffled over the whole dataset, and rows within a buffer of `buffer_rows`.
    In DataLoader workers each serves a share; shares are disjoint and together whole. Every pass over the object is
    `epochs` epochs, and goes on from the last one; workers start afresh with every pass over their DataLoader, so there
    call `set_epoch` before it, or pass `epochs`.

    Args:
        dataset: from `load`.
        site: as for `ActivationDataset.rows`.
        shuffle: False: by request and position.
        seed: of the order.
        batch_size: rows in a batch; None for single rows [d], to be batched by a DataLoader.
        buffer_rows: rows that are mixed at a time; memory is about twice that.
        epochs: passes over the data; None for no end.
        labels: yield (rows, positions, token_ids, request_index) instead of rows.
        drop_last: leave out the last batch of a share and epoch if it is short.
        shard: (i, n): only the i-th of n shares, e.g. a rank of a distributed job.

    Yields:
        float32 (or the stored dtype, where all rows are uncompressed and have one) [batch_size, d]; the last batch may
        be shorter.
    """

    def __init__(
        self, dataset: ActivationDataset, site: object, *, shuffle: bool = True, seed: int = 0,
        batch_size: int | None = None, buffer_rows: int = 65_536, epochs: int | None = 1, labels: bool = False,
        drop_last: bool = False, shard: tuple[int, int] = (0, 1),
    ) -> None:  # fmt: skip
        for name, value, least in (
            ("batch_size", batch_size, 1), ("buffer_rows", buffer_rows, 1), ("epochs", epochs, 1), ("seed", seed, 0),
        ):  # fmt: skip
            optional = name in ("batch_size", "epochs")
            if not (value is None and optional) and (type(value) is not int or value < least):
                raise WeirError(f"an int, at least {least}, got {value!r}", name)
        if not (len(shard) == 2 and all(type(i) is int for i in shard) and 0 <= shard[0] < shard[1]):
            raise WeirError(f"shard is (i, n) with 0 <= i < n, got {shard!r}", "shard")
        self.dataset, self.site = dataset, site
        self.shuffle, self.seed, self.batch_size, self.buffer_rows = shuffle, seed, batch_size, buffer_rows
        self.epochs, self.labels, self.drop_last, self.shard = epochs, labels, drop_last, shard
        self.epoch = 0
        self.total = dataset.count(site)
        self._dtype = _dtype(dataset, site)

    def __len__(self) -> int:
        """Rows (or batches) of one epoch, without workers and shards."""
        if self.shard != (0, 1):
            raise TypeError("the length of a share depends on the order")
        if self.batch_size is None:
            return self.total
        return self.total // self.batch_size if self.drop_last else -(-self.total // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next pass begins with."""
        self.epoch = epoch

    def __iter__(self) -> Iterator:
        info = get_worker_info()
        mine, of = self.shard
        if info is not None:
            mine, of = mine * info.num_workers + info.id, of * info.num_workers
        first = self.epoch
        passes = 0
        while self.epochs is None or passes < self.epochs:
            yield from self._epoch(first + passes, mine, of)
            passes += 1
            self.epoch = first + passes

    def _epoch(self, epoch: int, mine: int, of: int) -> Iterator:
        index = self.dataset.index
        runs = self.dataset._runs(self.site, None)
        which, at = self.dataset._ordered(runs) if not self.shuffle else index.expand(runs)
        # Pieces end where a run ends, so each is consecutive in its file.
        edges = np.flatnonzero(np.diff(which, prepend=-1, append=-1)) if len(which) else np.zeros(1, np.int64)
        begins = np.concatenate(
            [np.arange(a, b, PIECE) for a, b in itertools.pairwise(edges.tolist())] or [np.zeros(0, np.int64)]
        )
        ends = np.concatenate([begins[1:], [len(which)]]).astype(np.int64)
        order = np.arange(len(begins))
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(begins))
        order = order[mine::of]
        generator = np.random.default_rng([self.seed, epoch, mine])
        left: list[np.ndarray] = []
        waiting = 0
        for piece in order.tolist():
            left.append(np.arange(begins[piece], ends[piece]))
            waiting += len(left[-1])
            if waiting >= max(self.buffer_rows, self.batch_size or 1):  # less would be shuffled for nothing
                rows = np.concatenate(left)
                keep = len(rows) % (self.batch_size or 1)  # so that only the last batch is short
                if self.shuffle:
                    generator.shuffle(rows)
                yield from self._batches(which, at, rows[: len(rows) - keep])
                left, waiting = [rows[len(rows) - keep :]], keep
        if waiting:
            rows = np.concatenate(left)
            if self.shuffle:
                generator.shuffle(rows)
            yield from self._batches(which, at, rows)

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
            if self.drop_last and begin + size > len(rows):
                return
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


def _dtype(dataset: ActivationDataset, site: object) -> torch.dtype:
    """The dtype of a site's rows, taken together."""
    index = dataset.index
    blocks = np.unique(index.block[dataset._runs(site, None)]).tolist()
    headers = [index.blocks[block].header for block in blocks]
    found = {PLAIN[h["dtype"]] if h["method"] == "none" else torch.float32 for h in headers}
    return found.pop() if len(found) == 1 else torch.float32
