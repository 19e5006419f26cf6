"""The host buffer: memory that the device writes and that other processes of this machine can map."""

from __future__ import annotations

import logging
import mmap
import os
import queue
import threading

import torch

logger = logging.getLogger(__name__)
BLOCK = 32 << 20
"""Bytes that are pinned at once."""
AHEAD = 8
"""Blocks that are pinned in advance of the highest one in use."""


class HostBuffer:
    """`rows` rows of `row_bytes` bytes in an anonymous shared file, which is gone once no process has it.

    Pages come into being when they are first written; on CUDA they are pinned then, block by block, and stay so.

    Attributes:
        fd: file descriptor, to be sent to the processes that map it.
        bytes: uint8 tensor over all of it.
    """

    def __init__(self, rows: int, row_bytes: int, pin: bool) -> None:
        self.rows, self.row_bytes = rows, row_bytes
        size = rows * row_bytes
        self.fd = os.memfd_create("weir-rows")
        os.ftruncate(self.fd, size)
        self._map = mmap.mmap(self.fd, size)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned = [not pin] * (-(-size // BLOCK))
        self._lock = threading.Lock()
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if pin:
            self._device = torch.cuda.current_device()
            self._thread = threading.Thread(target=self._pin_ahead, name="weir-pin", daemon=True)
            self._thread.start()

    def view(self, d_model: int, dtype: torch.dtype) -> torch.Tensor:
        """The rows, [rows, d_model]."""
        return self.bytes.view(dtype).view(self.rows, d_model)

    def prepare(self, start: int, rows: int) -> None:
        """Make sure that the device can write these rows."""
        first, last = start * self.row_bytes // BLOCK, ((start + rows) * self.row_bytes - 1) // BLOCK
        for block in range(first, last + 1):
            if not self._pinned[block]:
                self._pin(block)
        if self._thread is not None and not all(self._pinned[last : last + AHEAD // 2]):
            self._wanted.put(last)

    def pieces(self, start: int, rows: int) -> list[tuple[int, int]]:
        """(start, rows) of parts that lie in one pinned block each but for rows that straddle two."""
        out = []
        while rows:
            edge = -(-((start * self.row_bytes // BLOCK + 1) * BLOCK) // self.row_bytes)
            count = min(rows, max(1, edge - start))
            out.append((start, count))
            start, rows = start + count, rows - count
        return out

    def close(self) -> None:
        """Stop pinning; the memory goes with the last one who maps it."""
        self._wanted.put(None)

    def _pin(self, block: int) -> None:
        with self._lock:
            if self._pinned[block]:
                return
            start = block * BLOCK
            size = min(BLOCK, len(self.bytes) - start)
            cudart = torch.cuda.cudart()
            torch.cuda.check_error(cudart.cudaHostRegister(self.bytes.data_ptr() + start, size, 0))
            self._pinned[block] = True

    def _pin_ahead(self) -> None:
        torch.cuda.set_device(self._device)
        while (last := self._wanted.get()) is not None:
            for block in range(last + 1, min(last + 1 + AHEAD, len(self._pinned))):
                try:
                    self._pin(block)
                except RuntimeError as e:
                    # Whoever needs the block pins it then, and is told if that fails too.
                    logger.warning("Weir could not pin host memory in advance: %s", e)
                    break
