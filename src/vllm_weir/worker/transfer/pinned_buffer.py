"""The host memory that the device writes and that other processes of this machine map."""

from __future__ import annotations

import logging
import math
import mmap
import os
import queue
import threading

import numpy as np
import torch

from vllm_weir.errors import WeirError
from vllm_weir.util.h2d import is_out_of_memory

logger = logging.getLogger(__name__)
BLOCK = 64 << 20
"""Approximate number of bytes pinned in one go."""
AHEAD = 4
"""Blocks that are pinned in advance of the highest one in use."""


class HostBuffer:
    """Rows in an anonymous shared file, which is gone once no process has it.

    Pages are allocated when they are first written; on CUDA they are pinned then, block by block,
    and stay so.

    Args:
        pin: whether a CUDA device writes them.

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
        # No row or page straddles two blocks.
        page = math.lcm(row_bytes, mmap.PAGESIZE)
        self._block = max(page, BLOCK // page * page)
        self._block_rows = self._block // row_bytes
        self._pinned = [not pin] * (-(-size // self._block))
        self._lock = threading.Lock()
        self._used_blocks: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if pin:
            self._device = torch.cuda.current_device()
            self._thread = threading.Thread(target=self._pin_ahead, name="weir-pin", daemon=True)
            self._thread.start()

    def view(self, d_model: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows, [rows, d_model]."""
        return self.bytes.view(dtype).view(self.rows, d_model)

    def prepare(self, start: int, rows: int) -> None:
        """Pin these rows, so that the device can write them, and let a thread pin the next ones.

        Raises WeirError if the host has no memory for it.
        """
        first, last = start // self._block_rows, (start + rows - 1) // self._block_rows
        for block in range(first, last + 1):
            if not self._pinned[block]:
                self._pin_now(block)
        if self._thread is not None and not all(self._pinned[last : last + AHEAD // 2]):
            self._used_blocks.put(last)

    def pin(self, rows: int) -> int:
        """Pin the first `rows` rows, or all there are, and return how many bytes were not pinned before.

        Raises WeirError if the host has no memory for it.
        """
        wanted = min(-(-rows // self._block_rows), len(self._pinned))
        blocks = [block for block in range(wanted) if not self._pinned[block]]
        for block in blocks:
            self._pin_now(block)
        return sum(min(self._block, len(self.bytes) - block * self._block) for block in blocks)

    def split(self, segments: np.ndarray) -> np.ndarray:
        """Cut segments, int64 [n, 3] of source row, row here and number of rows, at the edges of blocks.

        The driver takes no copy that touches two.
        """
        return _split(segments, self._block_rows)

    def split_bytes(self, pieces: np.ndarray) -> np.ndarray:
        """Cut pieces, int64 [n, 3] of source byte, byte here and number of bytes, see `split`."""
        return _split(pieces, self._block)

    def split_runs(self, runs: np.ndarray) -> np.ndarray:
        """Cut runs, see `split`.

        `runs` is int64 [n, 5] of first lane, row here, rows here from one lane to the next, lanes, and rows
        that are copied of each lane; the result int64 [m, 6] of first lane, the first row that is copied of
        each lane, and the rest.
        """
        _, places, steps, counts, widths = runs.T
        size = self._block_rows
        first, last = places // size, (places + (counts - 1) * steps + widths - 1) // size
        within = first == last
        whole, parts = np.insert(runs[within], 1, 0, axis=1), []
        if within.all():
            return whole
        for lane, place, step, count, width in runs[~within].tolist():
            while count:
                edge = (place // size + 1) * size
                if place + width > edge:  # the edge cuts this lane's rows in two
                    n = 1
                    parts.append((lane, 0, place, step, 1, edge - place))
                    parts.append((lane, edge - place, edge, step, 1, place + width - edge))
                else:
                    n = min(count, (edge - place - width) // step + 1)
                    parts.append((lane, 0, place, step, n, width))
                lane, place, count = lane + n, place + n * step, count - n
        return np.concatenate([whole, np.array(parts, np.int64)])

    def close(self) -> None:
        """Wait for the device's copies, then unpin; the memory lives until no process maps it.

        CUDA remembers registered addresses: if they stayed registered, a later mapping at the same
        address could not be pinned.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._used_blocks.put(None)
        thread.join()
        torch.cuda.synchronize(self._device)
        for block in np.flatnonzero(self._pinned).tolist():
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr() + block * self._block))
            self._pinned[block] = False

    def _pin_now(self, block: int) -> None:
        """Pin a block, in a thread: CUDA keeps an error for the thread's next call, and the engine's would fail."""
        errors: list[RuntimeError] = []

        def pin() -> None:
            torch.cuda.set_device(self._device)
            try:
                self._pin(block)
            except RuntimeError as e:
                errors.append(e)

        thread = threading.Thread(target=pin, name="weir-pin-now", daemon=True)
        thread.start()
        thread.join()
        if not errors:
            return
        if not is_out_of_memory(errors[0]):
            raise errors[0]
        raise WeirError(
            "the host has no memory left that can be pinned for rows; send the request again once others have ended, "
            "or lower the setting host_bytes"
        ) from errors[0]

    def _pin(self, block: int) -> None:
        with self._lock:
            if self._pinned[block]:
                return
            start = block * self._block
            size = min(self._block, len(self.bytes) - start)
            cudart = torch.cuda.cudart()
            torch.cuda.check_error(cudart.cudaHostRegister(self.bytes.data_ptr() + start, size, 0))
            self._pinned[block] = True

    def _pin_ahead(self) -> None:
        torch.cuda.set_device(self._device)
        while (last := self._used_blocks.get()) is not None:
            for block in range(last + 1, min(last + 1 + AHEAD, len(self._pinned))):
                try:
                    self._pin(block)
                except RuntimeError as e:
                    # `prepare` pins the block when it is needed, and raises if that fails too.
                    logger.warning(
                        "Weir could not pin host memory in advance, and tries again when it is needed: %s", e
                    )
                    break


def _split(segments: np.ndarray, block: int) -> np.ndarray:
    first, last = segments[:, 1] // block, (segments[:, 1] + segments[:, 2] - 1) // block
    within = first == last
    if within.all():
        return segments
    parts = []
    for source, place, size in segments[~within].tolist():
        while size:
            n = min(size, block - place % block)
            parts.append((source, place, n))
            source, place, size = source + n, place + n, size - n
    return np.concatenate([segments[within], np.array(parts, np.int64)])
