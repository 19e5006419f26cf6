"""Directions that live requests project their rows onto, on the device, each set once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_weir.util.h2d import upload
from vllm_weir.worker.steering.vector_fetch import VectorFetcher
from vllm_weir.worker.transfer.codecs import Codecs


@dataclass(frozen=True)
class Products:
    """A codec whose records are products with directions, float32.

    Attributes:
        matrix: the directions, float32 [m, d_model].
    """

    matrix: torch.Tensor
    quick = False

    @property
    def record_bytes(self) -> int:
        """Bytes of a row's products."""
        return 4 * len(self.matrix)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """uint8 [n, record_bytes] of rows [n, d_model]; what becomes of one does not depend on the others."""
        if not rows.is_cuda:
            return (rows.double() @ self.matrix.double().T).float().view(torch.uint8)
        from vllm_weir.worker.transfer.direction_kernel import products

        self.matrix.record_stream(torch.cuda.current_stream())  # its request may leave before this is done
        return products(rows.contiguous(), self.matrix).view(torch.uint8)


class Directions:
    """Sets of directions by content, counted by the requests that use them.

    Args:
        codecs: where their products are entered.
    """

    def __init__(self, fetcher: VectorFetcher, device: torch.device, codecs: Codecs) -> None:
        self._fetcher, self._device, self._codecs = fetcher, device, codecs
        self._of: dict[tuple[str, ...], int] = {}
        self._users: dict[tuple[str, ...], set[str]] = {}
        self._held: dict[str, tuple[str, ...]] = {}

    def absent(self, digests: tuple[str, ...]) -> tuple[str, ...]:
        """Those of these that would have to be fetched."""
        return () if digests in self._of else digests

    def hold(self, request_id: str, digests: tuple[str, ...], reply: str) -> int:
        """The number of a set's codec; the set is fetched from the reader at `reply` if it is not here, ValueError if
        that fails."""
        if digests not in self._of:
            rows = self._fetcher.fetch(reply, list(digests))
            matrix = upload(np.stack([rows[d] for d in digests]), self._device)
            self._of[digests] = self._codecs.enter(Products(matrix))
        self._users.setdefault(digests, set()).add(request_id)
        self._held[request_id] = digests
        return self._of[digests]

    def release(self, request_id: str) -> None:
        """A request has left; unknown ids are fine."""
        digests = self._held.pop(request_id, None)
        if digests is None:
            return
        self._users[digests].discard(request_id)
        if not self._users[digests]:
            del self._users[digests]
            self._codecs.strike(self._of.pop(digests))
