"""Directions that rows are projected on, and the codecs that a request uses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_weir.schema.request import Postprocess
from vllm_weir.util.h2d import upload
from vllm_weir.worker.planning.capture_planner import ReadOutCodec
from vllm_weir.worker.steering.vector_fetch import VectorFetcher
from vllm_weir.worker.transfer.codecs import Codecs
from vllm_weir.worker.transfer.read_outs import ReadOuts


@dataclass(frozen=True)
class Products:
    """The codec whose records are products with directions, float32."""

    matrix: torch.Tensor  # the directions, float32 [m, d_model]
    quick = by_column = False

    @property
    def record_bytes(self) -> int:
        return 4 * len(self.matrix)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the products of rows [n, d_model] as bytes, uint8 [n, record_bytes].

        A row's products do not depend on the other rows.
        """
        if not rows.is_cuda:
            return (rows.double() @ self.matrix.double().T).float().view(torch.uint8)
        from vllm_weir.worker.transfer.direction_kernel import products

        # The request may leave, and the matrix be freed, before the device has used it.
        self.matrix.record_stream(torch.cuda.current_stream())
        return products(rows.contiguous(), self.matrix).view(torch.uint8)


class Directions:
    """The sets of directions in use, each on the device once."""

    def __init__(self, fetcher: VectorFetcher, device: torch.device, codecs: Codecs, d_model: int) -> None:
        self._fetcher, self._device, self._codecs, self._d_model = fetcher, device, codecs, d_model
        self._numbers: dict[tuple[str, ...], int] = {}
        self._users: dict[tuple[str, ...], set[str]] = {}
        self._held: dict[str, tuple[str, ...]] = {}

    def absent(self, digests: tuple[str, ...]) -> tuple[str, ...]:
        """Return the digests of vectors that would have to be fetched for this set."""
        return () if digests in self._numbers else digests

    def hold(self, request_id: str, digests: tuple[str, ...], endpoint: str) -> int:
        """Return the number of a set's codec, which `request_id` uses until `release`.

        A set that is not on the device is fetched from the reader at `endpoint`. Raises ValueError if it cannot be
        fetched.
        """
        if digests not in self._numbers:
            vectors = self._fetcher.fetch(endpoint, list(digests))
            matrix = np.stack([vectors[digest] for digest in digests])
            if matrix.shape[1] != self._d_model:
                raise ValueError(f"the directions have {matrix.shape[1]} values, the rows {self._d_model}")
            self._numbers[digests] = self._codecs.add(Products(upload(matrix, self._device)))
        self._users.setdefault(digests, set()).add(request_id)
        self._held[request_id] = digests
        return self._numbers[digests]

    def release(self, request_id: str) -> None:
        """Release the directions of a request that has left, if it has any."""
        digests = self._held.pop(request_id, None)
        if digests is None:
            return
        self._users[digests].discard(request_id)
        if not self._users[digests]:
            del self._users[digests]
            self._codecs.remove(self._numbers.pop(digests))


class RequestCodecs:
    """Holds the codec of each request's rows until the request is released."""

    def __init__(self, directions: Directions, compressions: Codecs, read_outs: ReadOuts) -> None:
        self._directions, self._compressions, self._read_outs = directions, compressions, read_outs

    def absent_vectors(self, postprocess: Postprocess | None) -> tuple[str, ...]:
        """Return the digests of vectors that would have to be fetched for a request's codec."""
        if postprocess is None or not postprocess.directions:
            return ()
        return self._directions.absent(postprocess.directions)

    def hold(self, request_id: str, postprocess: Postprocess | None, endpoint: str) -> tuple[int, ReadOutCodec | None]:
        """Return `codec` and `read_out_codec` of `Planner.add_capture` for a request of the reader at `endpoint`.

        Raises ValueError if a direction cannot be fetched; WeirError if the device cannot compute it, or something
        cannot be read.
        """
        if postprocess is None:
            return -1, None
        if postprocess.directions:
            return self._directions.hold(request_id, postprocess.directions, endpoint), None
        if postprocess.compression is not None:
            return self._compressions.hold(request_id, postprocess.compression), None
        if postprocess.read_outs:
            return -1, self._read_outs.hold(request_id, postprocess.read_outs, postprocess.with_rows)
        return -1, None

    def release(self, request_id: str) -> None:
        self._directions.release(request_id)
        self._compressions.release(request_id)
        self._read_outs.release(request_id)
