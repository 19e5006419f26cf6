"""Vectors that travel with their request, so that the workers need not ask for them while the engine waits."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from vllm_weir.frontend.admit import Admitted

MOST = 64 << 10
"""Bytes of vectors that a request takes along; of more than that the workers ask for those that they lack. A request
keeps its own for as long as it waits."""


class Along:
    """What one caller has sent to its engine lately.

    Nobody relies on its being there still: what a worker lacks it asks for.

    Args:
        room: vectors that the engine's table holds.
    """

    def __init__(self, room: int) -> None:
        self._most = max(room // 2, 1)  # others fill the table, too
        self._sent: OrderedDict[str, None] = OrderedDict()

    def of(self, admitted: Admitted) -> dict[str, bytes]:
        """float32 bytes by digest of the vectors that a request of this kind takes along."""
        sent, treatment = self._sent, admitted.spec.treatment
        wanted = [digest for digest in admitted.digests if digest not in sent]
        # Directions leave the device with the last request that projects on them.
        directions = treatment.directions if treatment is not None else ()
        if not wanted and not directions:
            for digest in admitted.digests:
                sent.move_to_end(digest)
            return {}
        rows = {digest: admitted.rows[digest] for digest in (*wanted, *directions)}
        if sum(row.size for row in rows.values()) * 4 > MOST:
            return {}
        for digest in admitted.digests:
            sent[digest] = None
            sent.move_to_end(digest)
        while len(sent) > self._most:
            sent.popitem(last=False)
        return {digest: row_bytes(row) for digest, row in rows.items()}


def row_bytes(row: np.ndarray) -> bytes:
    """A vector as it travels: float32, little-endian."""
    return np.ascontiguousarray(row, "<f4").tobytes()
