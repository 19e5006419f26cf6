"""Copies of rows from the ring to their places in the host buffer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from vllm_weir.worker.planning.columns import as_integers
from vllm_weir.worker.planning.step_plan import StepPlan
from vllm_weir.worker.transfer.cuda_memcpy import copy_pieces, copy_runs
from vllm_weir.worker.transfer.pinned_buffer import HostBuffer
from vllm_weir.worker.transfer.postprocess import CompressedRecords
from vllm_weir.worker.transfer.ring import Ring

Pack = Callable[[], list[CompressedRecords]]


def no_wait() -> None:
    """Return at once; stands for the wait where there is nothing to wait for."""


class CpuCopyOut:
    """Copies in place, without a device."""

    def __init__(self, ring: Ring, host: HostBuffer) -> None:
        self._bytes = host.bytes.numpy()
        self._rows = self._bytes.reshape(host.rows, host.row_bytes)
        self._ring = ring.buffer.view(torch.uint8).numpy()

    def ship(self, plan: StepPlan, start: int, pack_quick: Pack, pack_slow: Pack) -> Callable[[], None]:
        """Copy what a step has written.

        Args:
            plan: the step's plan.
            start: the ring row from which on it has written.
            pack_quick: makes compressed records of the rows, in microseconds on the device. Called
                where its work comes after the rows were written; the records are copied too.
            pack_slow: the same, for records that take longer.

        Returns:
            A function that waits until all of it has arrived.
        """
        for packet in (*pack_quick(), *pack_slow()):
            records = packet.records.view(-1).numpy()
            for source, target, size in packet.pieces.tolist():
                self._bytes[target : target + size] = records[source : source + size]
        for slot, row, rows in plan.segments.tolist():
            self._rows[row : row + rows] = self._ring[start + slot : start + slot + rows]
        return no_wait


class CudaCopyOut:
    """Copies on a side stream, without holding up the main stream.

    Quick packing runs on the main stream: on the side stream, beside the model's kernels, it would
    delay a step by several times its own duration.
    """

    def __init__(self, ring: Ring, host: HostBuffer) -> None:
        self._ring, self._host = ring, host
        self.stream = torch.cuda.Stream(ring.buffer.device)
        self._row_bytes = host.row_bytes
        self._source, self._target = ring.buffer.data_ptr(), host.bytes.data_ptr()

    def ship(self, plan: StepPlan, start: int, pack_quick: Pack, pack_slow: Pack) -> Callable[[], None]:
        """Copy what a step has written, see `CpuCopyOut.ship`."""
        written, copied = torch.cuda.Event(), torch.cuda.Event()
        quick_packets = pack_quick() if plan.has_records else ()
        written.record()
        self.stream.wait_event(written)
        for packet in quick_packets:
            packet.records.record_stream(self.stream)
            self.send_packet(packet)
        if plan.has_records:
            with torch.cuda.stream(self.stream):
                # Records are allocated for this stream: their memory is not reused before they have
                # been copied.
                for packet in pack_slow():
                    self.send_packet(packet)
        self.send(as_integers(plan.segments) + np.array((start, 0, 0)))
        copied.record(self.stream)
        self._ring.release_after(start, plan.rows, copied)
        return copied.synchronize

    def send(self, segments: np.ndarray) -> None:
        """Copy rows, int64 [m, 3] of ring row, arena row, number of rows."""
        if not len(segments):
            return
        parts = self._host.split(segments)
        size = self._row_bytes
        copy_pieces(
            self._target + parts[:, 1] * size,
            self._source + parts[:, 0] * size,
            parts[:, 2] * size,
            self.stream.cuda_stream,
        )

    def send_packet(self, packet: CompressedRecords) -> None:
        parts = self._host.split_bytes(packet.pieces)
        source = packet.records.data_ptr()
        copy_pieces(self._target + parts[:, 1], source + parts[:, 0], parts[:, 2], self.stream.cuda_stream)

    def send_runs(self, start: int, stride: int, runs: np.ndarray) -> None:
        """Copy runs of rows with gaps between them.

        `start`: ring row of lane 0; `stride`: ring rows of a lane; `runs`: int64 [m, 5] of first lane, arena row, arena
        rows from one lane to the next, lanes, and rows that are copied of each lane.
        """
        lanes, firsts, places, steps, counts, widths = self._host.split_runs(runs).T
        size = self._row_bytes
        copy_runs(
            self._target + places * size,
            steps * size,
            self._source + (start + lanes * stride + firsts) * size,
            stride * size,
            widths * size,
            counts,
            self.stream.cuda_stream,
        )
