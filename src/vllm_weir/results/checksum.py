"""Checksums of stored records, 32 bits each, to notice bytes that have changed.

A record's 64-bit words (little-endian, the last one filled up with zeros) are added; the checksum
is the upper half of the sum times `MULTIPLIER`, both modulo 2^64. It is a mere sum because that
keeps up with a disk. So it does not notice words that change places within a record, nor changes
that cancel out in the sum.
"""

from __future__ import annotations

import numpy as np

MULTIPLIER = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio, an odd number that spreads every bit of a sum over the upper half."""


def checksums(records: np.ndarray) -> np.ndarray:
    """Return the checksum of each record.

    Args:
        records: uint8 [n, width], of any strides and alignment.

    Returns:
        uint32 [n]. Records that differ in one bit never have the same, unrelated ones with a chance
        of 2^-32.
    """
    n, width = records.shape
    if n and width > 1 and records.strides[1] != 1:
        records = np.ascontiguousarray(records)
    whole = width - width % 8
    # einsum makes no copy of strided records, and is faster than add.reduce for short ones.
    total = np.einsum("ij->i", records[:, :whole].view("<u8")) if n and whole else np.zeros(n, np.uint64)
    if width > whole:
        last = np.zeros((n, 8), np.uint8)
        last[:, : width - whole] = records[:, whole:]
        total += last.view("<u8")[:, 0]
    return ((total * np.uint64(MULTIPLIER)) >> np.uint64(32)).astype(np.uint32)
