"""The outlet: rows on their way from the ring to their places in the host buffer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from vllm_weir.worker.hostmem import HostBuffer
from vllm_weir.worker.ring import Ring
from vllm_weir.worker.step import StepPlan

STAGING = 4


def at_once() -> None:
    """What to call for rows that are there already."""


class CpuOutlet:
    """Copies at once."""

    def __init__(self, ring: Ring, host: HostBuffer, max_tokens: int) -> None:
        self._ring = ring.buffer
        self._rows = host.view(ring.buffer.shape[1], ring.buffer.dtype)

    def ship(self, plan: StepPlan, start: int) -> Callable[[], None]:
        """Move what the step has written from ring row `start` on; returns what to call to wait for its arrival."""
        jobs = plan.jobs
        for width in np.unique(jobs[:, 3]):
            some = jobs[jobs[:, 3] == width]
            columns = np.arange(width)
            source = start + some[:, 0, None] + columns
            target = some[:, 1, None] + some[:, 2, None] * columns
            self._rows[torch.from_numpy(target.ravel())] = self._ring[torch.from_numpy(source.ravel())]
        return at_once


class CudaOutlet:
    """Copies on a side stream, by a kernel that writes the host's memory: one launch however scattered the places."""

    def __init__(self, ring: Ring, host: HostBuffer, max_tokens: int) -> None:
        self._ring = ring
        self._host = host
        self._rows = host.view(ring.buffer.shape[1], ring.buffer.dtype)
        device = ring.buffer.device
        self.stream = torch.cuda.Stream(device)
        self._jobs = torch.zeros(STAGING, max_tokens, 4, dtype=torch.int64, device=device)
        self._staging = torch.zeros(STAGING, max_tokens, 4, dtype=torch.int64, pin_memory=True)
        self._copied = [torch.cuda.Event() for _ in range(STAGING)]
        self._turn = 0

    def ship(self, plan: StepPlan, start: int) -> Callable[[], None]:
        """As `CpuOutlet.ship`; the main stream does not wait."""
        from vllm_weir.worker.outlet_triton import scatter

        jobs = self.upload(plan.jobs)
        written, copied = torch.cuda.Event(), torch.cuda.Event()
        written.record()
        with torch.cuda.stream(self.stream):
            written.wait()
            device_jobs = jobs()
            scatter(self._ring.buffer[start:], device_jobs, int(plan.jobs[:, 3].max()), self._host.bytes.data_ptr())
            copied.record()
        self._ring.leaves(start, plan.rows, copied)
        return copied.synchronize

    def send(self, start: int, pieces, rest: torch.Tensor | None, ranks: torch.Tensor, column: int) -> None:
        """Copy one column's rows from ring row `start` on, on the current stream.

        Args:
            pieces: (row after `start`, host row, rows) for the copy engine.
            rest: int64 [n, 4] on the device: row after `start`, host row of the first column, host rows from one
                column to the next, profile; for the kernel.
            ranks: int32 [profiles, columns] on the device.
            column: the column.
        """
        from vllm_weir.worker.outlet_triton import scatter_column

        for lane, row, count in pieces:
            for target, n in self._host.pieces(row, count):
                source = start + lane + target - row
                self._rows[target : target + n].copy_(self._ring.buffer[source : source + n], non_blocking=True)
        if rest is not None:
            scatter_column(self._ring.buffer[start:], rest, ranks, column, self._host.bytes.data_ptr())

    def upload(self, jobs: np.ndarray) -> Callable[[], torch.Tensor]:
        """Stage a table of jobs; the callable issues its copy to the device on the current stream."""
        self._turn = turn = (self._turn + 1) % STAGING
        self._copied[turn].synchronize()
        n = len(jobs)
        self._staging[turn].numpy()[:n] = jobs

        def issue() -> torch.Tensor:
            target = self._jobs[turn, :n]
            target.copy_(self._staging[turn, :n], non_blocking=True)
            self._copied[turn].record()
            return target

        return issue
