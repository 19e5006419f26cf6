"""Checking that every row of a dataset is still what was written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vllm_weir.errors import MissingFile, StoreError, WeirError
from vllm_weir.storage.dataset import ActivationDataset
from vllm_weir.storage.index import Index
from vllm_weir.storage.record_blocks import RecordBlock

PIECE_BYTES = 64 << 20
"""Records are read in pieces of about this many bytes."""


@dataclass(frozen=True)
class Damage:
    """A file with damaged rows."""

    file: str  # the file
    rows: int  # how many of its rows are damaged
    error: str  # what is wrong with the first of them


@dataclass(frozen=True)
class Verified:
    """The result of `verify`."""

    rows: int  # Rows of the dataset, all of which were read
    unsummed: int  # Those of them that were stored without a checksum, so that damage would not be noticed
    damaged: list[Damage]  # a `Damage` for each damaged file

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify(dataset: ActivationDataset, progress: Callable[[int], Any] | None = None) -> Verified:
    """Read all rows of a dataset, without decoding them, and compare them with their checksums.

    Of the layout ``sharded`` it also compares each shard's own manifest with the joined one.

    Args:
        dataset: From `load`.
        progress: Called with the number of rows read so far, after every piece.

    Raises:
        StoreError: If a file cannot be read, which says nothing about its rows.
    """
    index = dataset.index
    damaged: dict[str, Damage] = {}
    rows_read = 0
    if index.store is not None:
        from vllm_weir.storage.layouts.sharded_reader import damaged_shards  # which needs pyarrow

        for name, error in damaged_shards(index.store, index.files):
            file = index.store.describe(name)
            damaged[file] = Damage(file, 0, error.message)
    for block, runs in index.by_block():
        row_runs, row_ids = index.expand(runs)
        by_offset = np.argsort(index.offsets(row_runs, row_ids), kind="stable")
        piece_rows = max(1, PIECE_BYTES // block.width)
        for start in range(0, len(by_offset), piece_rows):
            piece = by_offset[start : start + piece_rows]
            damage = _damage(index, block, row_runs[piece], row_ids[piece])
            if damage is not None:
                earlier = damaged.get(damage.file, Damage(damage.file, 0, damage.error))
                damaged[damage.file] = Damage(damage.file, earlier.rows + damage.rows, earlier.error)
            rows_read += len(piece)
            if progress is not None:
                progress(rows_read)
    return Verified(rows_read, _rows_without_checksums(index), list(damaged.values()))


def _rows_without_checksums(index: Index) -> int:
    in_file = np.array([block.has_own_checksums for block in index.blocks], bool)
    without = ~index.run_has_checksums
    if len(in_file):
        without &= ~in_file[index.run_block]
    return int(index.run_rows[without].sum())


def _damage(index: Index, block: RecordBlock, row_runs: np.ndarray, row_ids: np.ndarray) -> Damage | None:
    """Return what is wrong with some rows of one block, if anything is."""
    file = block.store.describe(block.name)
    try:
        records = block.gather(index.offsets(row_runs, row_ids))
    except StoreError as e:
        if not isinstance(e, MissingFile):
            raise
        return Damage(file, len(row_ids), e.message)
    except WeirError as e:
        return Damage(file, len(row_ids), e.message)
    wrong = index.mismatches(row_runs, row_ids, records)
    if not len(wrong):
        return None
    return Damage(file, len(wrong), index.damage_error(row_runs[wrong], row_ids[wrong]).message)
