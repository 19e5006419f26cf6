"""Mirrors: the caller's view of the host memory in which workers leave rows."""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np
import torch


class MappedBuffer:
    """A worker's host buffer, mapped here; or none, for a worker that sends its rows in messages.

    Attributes:
        dropped: starts of pieces that nothing here refers to any more and that the worker has not been told of.
        pressure: share of the worker's buffer in use, as it last said.
    """

    def __init__(
        self, fd: int | None = None, rows: int = 0, row_bytes: int = 0, wake: Callable[[], None] = lambda: None
    ) -> None:
        self.dropped: deque[int] = deque()
        self.pressure = 0.0
        self._wake = wake
        self._row_bytes = row_bytes
        self._map = None
        if fd is not None:
            try:
                self._map = mmap.mmap(fd, rows * row_bytes)
            finally:
                os.close(fd)

    @property
    def shared(self) -> bool:
        """Whether rows arrive here without a copy."""
        return self._map is not None

    def piece(self, start: int, size: int) -> torch.Tensor:
        """uint8 [size] from row `start` on; the worker hears when the last tensor that shares this memory is gone."""
        if self._map is None:
            return torch.empty(size, dtype=torch.uint8)
        memory = np.frombuffer(self._map, np.uint8, size, start * self._row_bytes)
        weakref.finalize(memory, self.drop, start).atexit = False
        return torch.from_numpy(memory)

    def drop(self, start: int) -> None:
        """The piece is not needed here; may be called from any thread, even while garbage is collected."""
        self.dropped.append(start)
        self._wake()
