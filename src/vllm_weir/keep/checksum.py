"""Checksums of records: 32 bits for each, to notice bytes that changed where they are kept.

A record is cut into sectors of 512 bytes. Of each, the 64-bit words (little-endian, the last one filled up with zeros)
are added; the sum of sector i counts `multipliers`[i] times, all modulo 2^64, and the upper half of the total is the
checksum. Little but additions, because that is what keeps up with a disk. So it cannot see words that change places
within a sector, nor changes that cancel in its sum, as two flips of the same bit, one up and one down, do.
"""

from __future__ import annotations

import functools

import numpy as np

SECTOR = 512
KEY = 0x57656972


def checksums(records: np.ndarray) -> np.ndarray:
    """The checksum of each record.

    Args:
        records: uint8 [n, width], of any strides and alignment.

    Returns:
        uint32 [n]. Records that differ in one bit never have the same; overwritten ones have by a chance of 2^-32.
    """
    n, width = records.shape
    total = np.zeros(n, np.uint64)
    if n and width > 1 and records.strides[1] != 1:
        records = np.ascontiguousarray(records)
    of = multipliers(-(-width // SECTOR))
    whole = width // SECTOR * SECTOR
    if n and whole:
        words = records[:, :whole].view("<u8").reshape(n, -1, SECTOR // 8)  # read where they lie
        total += np.einsum("ij,j->i", np.einsum("ijk->ij", words), of[: words.shape[1]])
    if n and width > whole:
        total += _rest(records[:, whole:]) * of[-1]
    return (total >> np.uint64(32)).astype(np.uint32)


def _rest(part: np.ndarray) -> np.ndarray:
    """Sums of the words of a sector that is not whole: uint64 [n]."""
    n, width = part.shape
    whole = width - width % 8
    total = np.zeros(n, np.uint64)
    if whole:
        total += np.einsum("ij->i", part[:, :whole].view("<u8"))
    if width > whole:
        last = np.zeros((n, 8), np.uint8)
        last[:, : width - whole] = part[:, whole:]
        total += last.view("<u8")[:, 0]
    return total


@functools.lru_cache(maxsize=16)
def multipliers(n: int) -> np.ndarray:
    """uint64 [n]: the raw output of Philox4x64-10 with `KEY` as its key, the lowest bit of each set."""
    return np.random.Philox(key=KEY).random_raw(n) | np.uint64(1)
