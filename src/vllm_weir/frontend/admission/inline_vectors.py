"""Vectors that travel with their request, so that workers need not ask for them."""

from __future__ import annotations

import numpy as np

from vllm_weir.frontend.admission.admitted import AdmittedRequest
from vllm_weir.util.lru import LruCache

MAX_BYTES = 64 << 10
"""Bytes of vectors that travel with a request. If it has more, the workers ask for those that they
lack."""


class InlineVectors:
    """The vectors that one caller has sent to its engine recently, which need not be sent again.

    A guess: a worker asks for vectors that it has dropped.

    Args:
        table_bytes: bytes of the engine's table of vectors. Half of it may hold those of other
            callers.
    """

    def __init__(self, table_bytes: int) -> None:
        self._sent: LruCache[bool] = LruCache(table_bytes // 2)

    def of(self, admitted: AdmittedRequest) -> dict[str, bytes]:
        """Return the vectors that travel with a request: digest -> float32 bytes, little-endian."""
        unsent = [digest for digest in admitted.digests if not self._sent.get(digest)]
        # Directions are always sent: a worker drops them with the last request that projects on
        # them.
        postprocess = admitted.spec.postprocess
        directions = postprocess.directions if postprocess is not None else ()
        rows = {digest: admitted.rows[digest] for digest in (*unsent, *directions)}
        if sum(row.size for row in rows.values()) * 4 > MAX_BYTES:
            return {}
        for digest in unsent:
            self._sent.put(digest, True, rows[digest].size * 4)
        return {digest: row_bytes(row) for digest, row in rows.items()}


def row_bytes(row: np.ndarray) -> bytes:
    """Return a vector as float32 bytes, little-endian."""
    return np.ascontiguousarray(row, "<f4").tobytes()
