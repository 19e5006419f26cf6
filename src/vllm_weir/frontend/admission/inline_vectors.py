"""Vectors that travel with their request, so that the workers need not ask for them while the engine waits."""

from __future__ import annotations

import numpy as np

from vllm_weir.frontend.admission.admit import AdmittedRequest
from vllm_weir.util.lru import LruCache

MOST = 64 << 10
"""Bytes of vectors that a request takes along; of more than that the workers ask for those that they lack. A request
keeps its own for as long as it waits."""


class InlineVectors:
    """What one caller has sent to its engine lately.

    Nobody relies on its being there still: what a worker lacks it asks for.

    Args:
        room: bytes of the engine's table of vectors, half of which may be others'.
    """

    def __init__(self, room: int) -> None:
        self._sent: LruCache[bool] = LruCache(room // 2)

    def of(self, admitted: AdmittedRequest) -> dict[str, bytes]:
        """float32 bytes by digest of the vectors that a request of this kind takes along."""
        wanted = [digest for digest in admitted.digests if not self._sent.get(digest)]
        # Directions leave the device with the last request that projects on them.
        postprocess = admitted.spec.postprocess
        directions = postprocess.directions if postprocess is not None else ()
        rows = {digest: admitted.rows[digest] for digest in (*wanted, *directions)}
        if sum(row.size for row in rows.values()) * 4 > MOST:
            return {}
        for digest in wanted:
            self._sent.put(digest, True, rows[digest].size * 4)
        return {digest: row_bytes(row) for digest, row in rows.items()}


def row_bytes(row: np.ndarray) -> bytes:
    """A vector as it travels: float32, little-endian."""
    return np.ascontiguousarray(row, "<f4").tobytes()
