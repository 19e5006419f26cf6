"""Directions that live requests project their rows onto, on the device, each set once."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from vllm_weir.util.h2d import upload
from vllm_weir.worker.steering.vector_fetch import VectorFetcher


class Directions:
    """Sets of directions by content, counted by the requests that use them.

    Attributes:
        tensors: number -> float32 [m, d_model].
    """

    def __init__(self, fetcher: VectorFetcher, device: torch.device) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self._fetcher, self._device = fetcher, device
        self._numbers = itertools.count()
        self._of: dict[tuple[str, ...], int] = {}
        self._users: dict[tuple[str, ...], set[str]] = {}
        self._held: dict[str, tuple[str, ...]] = {}

    def absent(self, digests: tuple[str, ...]) -> tuple[str, ...]:
        """Those of these that would have to be fetched."""
        return () if digests in self._of else digests

    def hold(self, request_id: str, digests: tuple[str, ...], reply: str) -> int:
        """The number of a set, fetched from the reader at `reply` if it is not here; ValueError if that fails."""
        if digests not in self._of:
            rows = self._fetcher.fetch(reply, list(digests))
            number = next(self._numbers)
            self.tensors[number] = upload(np.stack([rows[d] for d in digests]), self._device)
            self._of[digests] = number
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
            del self.tensors[self._of.pop(digests)]
