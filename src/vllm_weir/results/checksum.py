"""Checksums of records: 32 bits for each, to notice bytes that changed where they are kept.

A record's 64-bit words (little-endian, the last one filled up with zeros) are added; the upper half of the sum times
`MULTIPLIER`, both modulo 2^64, is the checksum. It is no more than an addition because that keeps up with a disk. So it
cannot see words that change places within a record, nor changes that cancel in the sum, as two flips of the same bit of
two words, one up and one down, do.
"""

from __future__ import annotations

import numpy as np

MULTIPLIER = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: odd, and no 32 bits in a row of it are alike, so that every bit of a sum counts."""


def checksums(records: np.ndarray) -> np.ndarray:
    """The checksum of each record.

    Args:
        records: uint8 [n, width], of any strides and alignment.

    Returns:
        uint32 [n]. Records that differ in one bit never have the same; overwritten ones have by a chance of 2^-32.
    """
    n, width = records.shape
    if n and width > 1 and records.strides[1] != 1:
        records = np.ascontiguousarray(records)
    whole = width - width % 8
    # Words are added where they lie; einsum is faster than add.reduce where records are short.
    total = np.einsum("ij->i", records[:, :whole].view("<u8")) if n and whole else np.zeros(n, np.uint64)
    if width > whole:
        last = np.zeros((n, 8), np.uint8)
        last[:, : width - whole] = records[:, whole:]
        total += last.view("<u8")[:, 0]
    return ((total * np.uint64(MULTIPLIER)) >> np.uint64(32)).astype(np.uint32)
