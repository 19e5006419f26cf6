"""Reading every row of a dataset to see whether it is still what was written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vllm_weir.errors import MissingFile, StoreError, WeirError
from vllm_weir.storage.dataset import ActivationDataset
from vllm_weir.storage.index import Index
from vllm_weir.storage.record_blocks import RecordBlock

PIECE = 64 << 20
"""Records are read in pieces of about this many bytes."""


@dataclass(frozen=True)
class Damage:
    """A file of which some rows are damaged. `rows`: how many; `error`: what is wrong with the first of them."""

    file: str
    rows: int
    error: str


@dataclass(frozen=True)
class Verified:
    """What `verify` found.

    Attributes:
        rows: rows of the dataset, all of which were read.
        unsummed: those of them that were stored without a checksum, so that nothing can be said of their bytes.
        damaged: a `Damage` for each damaged file.
    """

    rows: int
    unsummed: int
    damaged: list[Damage]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


def verify(dataset: ActivationDataset, progress: Callable[[int], Any] | None = None) -> Verified:
    """Read all rows of a dataset, without decoding them, and compare them with their checksums; and each shard's own
    manifest with the joined one.

    Args:
        dataset: from `load`.
        progress: called with the number of rows that were read so far, after every piece.

    Raises:
        StoreError: if a file cannot be read, which says nothing of its rows.
    """
    index = dataset.index
    found: dict[str, Damage] = {}
    done = 0
    if index.store is not None:
        from vllm_weir.storage.layouts.sharded_reader import damaged_shards  # which needs pyarrow

        for name, error in damaged_shards(index.store, index.files):
            file = index.store.describe(name)
            found[file] = Damage(file, 0, error.message)
    for block, runs in index.by_block():
        which, at = index.expand(runs)
        at_byte = np.argsort(index.offsets(which, at), kind="stable")
        step = max(1, PIECE // block.width)
        for begin in range(0, len(at_byte), step):
            some = at_byte[begin : begin + step]
            one = _damage(index, block, which[some], at[some])
            if one is not None:
                before = found.get(one.file, Damage(one.file, 0, one.error))
                found[one.file] = Damage(one.file, before.rows + one.rows, before.error)
            done += len(some)
            if progress is not None:
                progress(done)
    sealed = np.array([block.sealed for block in index.blocks], bool)
    bare = ~index.summed & ~sealed[index.block] if len(sealed) else ~index.summed
    return Verified(done, int(index.rows[bare].sum()), list(found.values()))


def _damage(index: Index, block: RecordBlock, which: np.ndarray, at: np.ndarray) -> Damage | None:
    """What is wrong with some rows of one block."""
    file = block.store.describe(block.name)
    try:
        records = block.gather(index.offsets(which, at))
    except StoreError as e:
        if not isinstance(e, MissingFile):
            raise
        return Damage(file, len(at), e.message)
    except WeirError as e:
        return Damage(file, len(at), e.message)
    wrong = index.misfits(which, at, records)
    return Damage(file, len(wrong), index.damage(which[wrong], at[wrong]).message) if len(wrong) else None
