"""The host memory in which a worker leaves rows, as the caller's process sees it."""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np
import torch


class MappedBuffer:
    """A worker's host buffer, mapped into this process.

    It is empty for a worker that sends its rows in messages.

    Args:
        fd: file descriptor of the buffer, closed here; None for a worker that sends messages.
        rows, row_bytes: the buffer's size.
        wake: called after a piece was dropped.

    Attributes:
        dropped: starts of pieces that nothing here refers to any more, of which the worker has not
            been told yet.
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
        """Return uint8 [size] from row `start` on; the worker is told once no tensor shares this memory."""
        if self._map is None:
            return torch.empty(size, dtype=torch.uint8)
        memory = np.frombuffer(self._map, np.uint8, size, start * self._row_bytes)
        weakref.finalize(memory, self.drop, start).atexit = False
        return torch.from_numpy(memory)

    def drop(self, start: int) -> None:
        """Note that the piece at row `start` is not needed here; safe in any thread and garbage collection."""
        self.dropped.append(start)
        self._wake()
