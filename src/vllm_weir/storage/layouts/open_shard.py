"""`OpenShard`: a shard of the `sharded` layout that is being written."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from vllm_weir.errors import WeirError
from vllm_weir.results.checksum import checksums
from vllm_weir.storage.atomic_file import AtomicFile
from vllm_weir.storage.batch import CheckedBatch
from vllm_weir.storage.layouts.manifest import ShardRuns

HEADER_SPACE = 4096
"""Bytes at the start of a shard that are kept free for its header, which is written last: it has
the number of rows."""
GATHER_BYTES = 4 << 20
"""Records are gathered in memory up to this many bytes before they are written to the file: file
systems take a few large writes faster than many small ones, and so much stays in a processor's
cache."""
ROW_SPACE, RUN_SPACE, FINISH_SPACE, MANIFEST_SPACE = 24, 160, 160, 8 << 10
"""Upper bounds of the bytes in a shard's manifest for a row, a run, a finished request, and
everything else."""


@dataclass(eq=False)
class OpenShard:
    """A shard that is being written: records in the file, then in `sending`, then in `gathered`.

    Every record is copied once, into `gathered`, where its checksum is computed. `sending` is
    written by a thread while more records are gathered. If that write fails, it is repeated before
    anything that follows it is written.
    """

    file: AtomicFile  # the file
    runs: ShardRuns  # its runs so far
    header: dict  # Header of its records; empty for a shard without records
    thread: ThreadPoolExecutor  # Writes `sending`
    # Buffer of whole records, of which the first `gathered_bytes` are in use
    gathered: bytearray = field(default_factory=bytearray)
    gathered_bytes: int = 0
    spare: bytearray = field(default_factory=bytearray)  # the buffer that is not being filled; the two are swapped
    # what the thread writes, or has failed to write
    sending: memoryview = field(default_factory=lambda: memoryview(b""))
    # Checksums of consecutive records, by the byte of the file at which the first one begins
    checksums: dict[int, np.ndarray] = field(default_factory=dict)
    writing: Future[None] | None = None  # the thread's write, until its outcome is known
    torn: bool = False  # whether records of a batch that was not added whole may lie behind `end`
    end: int = HEADER_SPACE  # Bytes of the file, once everything so far is written
    manifest_space: int = MANIFEST_SPACE  # Upper bound of the bytes of its manifest

    def append(self, batch: CheckedBatch) -> None:
        """Add a batch, of which some stays in memory for now; after an error nothing of it is added."""
        self.mend()
        if batch.nbytes:
            self.torn = True
            self._gather(batch.records)
            self.torn = False
        self.runs.add(batch, self.end)
        self.end += batch.nbytes
        self.manifest_space += ROW_SPACE * len(batch.positions) + RUN_SPACE + len(batch.request_id)

    def write_all(self) -> None:
        """Write everything so far to the file; after a WeirError it can be tried again."""
        self.mend()
        self._send()
        self._wait()

    def secure(self) -> None:
        """Reserve disk space for everything so far and the manifest, or raise WeirError."""
        self.mend()
        self._wait()
        if self.file.reserve(self.end + self.manifest_space):
            self._send()
        else:
            self.write_all()

    def drop(self, request: str) -> None:
        """Forget a request's runs, and free the space of its records at the end of the shard."""
        columns = self.runs.columns
        counts = [rows for name, rows in zip(columns["request"], columns["rows"]) if name == request]
        self.manifest_space -= ROW_SPACE * sum(counts) + (RUN_SPACE + len(request)) * len(counts)
        self.runs.drop(request)
        offsets, rows = columns["offset"], columns["rows"]
        self._cut(offsets[-1] + rows[-1] * self.runs.stride if offsets else HEADER_SPACE)

    def mend(self) -> None:
        """Remove what an interrupted `append` has left."""
        if self.torn:
            self._cut(self.end)

    def _cut(self, end: int) -> None:
        """Remove everything behind byte `end` of the file, wherever it is by now."""
        if self.writing is not None:
            wait([self.writing])
            writing, self.writing = self.writing, None
            if writing.exception() is None:
                self.sending = memoryview(b"")
        unwritten = end - self.file.size
        if unwritten < 0:
            self.file.truncate(end)
            # The space was reserved; others may have taken it meanwhile.
            with contextlib.suppress(WeirError):
                self.file.reserve(end + self.manifest_space)
        self.checksums = {
            start: sums[: (end - start) // self.runs.stride] for start, sums in self.checksums.items() if start < end
        }
        self.gathered_bytes = min(self.gathered_bytes, max(0, unwritten - len(self.sending)))
        self.sending = self.sending[: max(0, unwritten)]
        self.end, self.torn = end, False

    def table(self) -> pa.Table:
        sums = np.concatenate([*self.checksums.values(), np.zeros(0, np.uint32)])
        by_run = []
        columns = self.runs.columns
        for offset, rows, finished in zip(columns["offset"], columns["rows"], columns["finished"]):
            first = 0 if finished else (offset - HEADER_SPACE) // self.runs.stride
            by_run.append(sums[first : first + (0 if finished else rows)])
        return self.runs.table(by_run)

    def _gather(self, records: np.ndarray) -> None:
        """Copy records to `gathered`, and let the thread write each buffer that is full."""
        stride = self.runs.stride
        capacity = max(1, GATHER_BYTES // stride) * stride
        while len(records):
            if self.gathered_bytes + stride > capacity:
                self._send()
            if not self.gathered:
                self.gathered = bytearray(capacity)
            taken = records[: (capacity - self.gathered_bytes) // stride]
            place = np.frombuffer(self.gathered, np.uint8, taken.nbytes, self.gathered_bytes)
            np.copyto(place.reshape(taken.shape), taken)
            self.gathered_bytes += taken.nbytes
            records = records[len(taken) :]

    def _send(self) -> None:
        """Let the thread write what was gathered, after what it was given earlier."""
        gathered = memoryview(self.gathered)[: self.gathered_bytes]
        # Here, while the thread still writes, and while the records are in the cache.
        sums = checksums(np.frombuffer(gathered, np.uint8).reshape(-1, self.runs.stride)) if gathered else None
        self._wait()
        if sums is not None:
            self.checksums[self.file.size] = sums
            self.sending = gathered
            self.gathered, self.spare, self.gathered_bytes = self.spare, self.gathered, 0
            self.writing = self.thread.submit(self.file.write, gathered)

    def _wait(self) -> None:
        """Wait until `sending` is written, or write it if the thread has failed to."""
        if self.writing is not None:
            wait([self.writing])  # if this is interrupted, `writing` is still set for the next call
            writing, self.writing = self.writing, None
            writing.result()
        elif self.sending:
            self.file.write(self.sending)
        self.sending = memoryview(b"")
