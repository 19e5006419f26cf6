"""`StreamedRows`: the trainer's end of a stream of rows, as a dataset of torch."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from vllm_weir.errors import WeirError, brief
from vllm_weir.streaming.batches import Cursor, RowBatch, batch_of, read_tensors
from vllm_weir.streaming.connection import Connection, connect, parse_address, raise_error


class StreamedRows(IterableDataset):
    """Batches of rows (`RowBatch`), as an engine computes them; from `stream_rows`, or made in another process.

    Batches come in the order of their numbers, also through ``DataLoader(rows, batch_size=None,
    num_workers=n)``, whatever `n` is. Each arrives exactly once: those before `cursor` never, those
    after it with the same bytes however often a trainer dies and asks again. A pass begins at
    `cursor`; a stream is read once, so there are no epochs.

    Over a Unix socket rows are in shared memory, and a batch's tensors are views of it that are the
    trainer's own: changing them changes nothing elsewhere. Over TCP they are received, without encryption.

    Args:
        address: Of the stream: ``tcp://HOST:PORT``, or the path of a socket of this machine.
        token: Of the stream.
        cursor: `RowBatch.cursor` of the last batch that was used, or a number of a batch; None for
            the first batch of the stream.
        checkpoints: False lets go of a batch when the next one is asked for. True keeps batches
            until `acknowledge`, so that a trainer that is killed goes on from its last checkpoint.
        shard: (i, n): every n-th batch alone, beginning with the i-th, as for a rank of a
            distributed job. With `checkpoints`, one rank acknowledges for all.
        wait_seconds: How long to wait for a stream that has not begun.

    Raises:
        WeirError: For a wrong argument, naming it; while iterating, if the stream cannot be reached
            or has failed, or the batch is gone.
    """

    def __init__(
        self, address: str, token: str, cursor: Cursor | tuple[int, int, int] | int | None = None, *,
        checkpoints: bool = False, shard: tuple[int, int] = (0, 1), wait_seconds: float = 60.0,
    ) -> None:  # fmt: skip
        parse_address(address)
        self.address, self.token, self.checkpoints, self.wait_seconds = address, token, checkpoints, wait_seconds
        self.cursor = None if cursor is None else batch_number(cursor)
        if not (isinstance(shard, tuple) and len(shard) == 2 and all(type(i) is int for i in shard)) or not (
            0 <= shard[0] < shard[1]
        ):
            raise WeirError(f"expected (i, n) with 0 <= i < n, got {brief(shard)}", "shard")
        self.shard = shard

    def __iter__(self) -> Iterator[RowBatch]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        rank, ranks = self.shard
        with contextlib.closing(connect(self.address, self.token, self.wait_seconds)) as connection:
            first = connection.start if self.cursor is None else self.cursor
            number, step = first + rank + ranks * worker, ranks * workers
            reader = _Reader(connection)
            connection.send({"get": number})
            while (batch := reader.read()) is not None:
                yield batch
                del batch  # before it is read whether views are left
                # Together, since the stream may have room for the next batch only when this one is done.
                done = {} if self.checkpoints else {"done": number}
                number += step
                with _alive():
                    for segment in reader.unmapped():
                        connection.send({"unmapped": segment})
                    connection.send(done | {"get": number})

    def acknowledge(self, cursor: Cursor | tuple[int, int, int] | int) -> None:
        """Let go of the batches before a cursor, which is that of a checkpoint that has been stored.

        Raises:
            WeirError: If the stream cannot be reached.
        """
        with contextlib.closing(connect(self.address, self.token, self.wait_seconds)) as connection:
            connection.send({"acknowledge": batch_number(cursor)})
            try:
                raise_error(connection.receive()[0])
            except (OSError, EOFError) as e:
                raise WeirError(f"the stream at {self.address} ended the connection ({e})", "address") from e


@contextlib.contextmanager
def _alive() -> Iterator[None]:
    """Raise WeirError if the other end goes."""
    try:
        yield
    except (OSError, EOFError) as e:
        raise WeirError(
            f"the stream has ended before its last batch ({e}); when its engine runs again, go on with the "
            "cursor of the last batch that you used",
            "address",
        ) from e


class _Reader:
    """Reads the batches that one connection asked for."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._unmapped: list[int] = []
        self._mapped: tuple[int, mmap.mmap] | None = None  # the segment whose batches come now

    def read(self) -> RowBatch | None:
        """Return the next batch; None at the end of the stream."""
        with _alive():
            message, fd = self._connection.receive()
            try:
                if "end" in raise_error(message):
                    return None
                memory, offset = self._memory(message, fd)
            finally:
                if fd is not None:
                    os.close(fd)
        return batch_of(read_tensors(memory, offset, message["tensors"]), message["cursor"])

    def unmapped(self) -> list[int]:
        """Return the segments of shared memory to which nothing has come to refer any more since the last call."""
        found = self._unmapped[:]
        del self._unmapped[: len(found)]
        return found

    def _memory(self, message: dict[str, Any], fd: int | None) -> tuple[mmap.mmap | torch.Tensor, int]:
        """Return where a batch is, and at which byte it begins."""
        if fd is None:
            received = torch.empty(message["bytes"], dtype=torch.uint8)
            self._connection.receive_into(received.numpy().data)
            return received, 0
        if self._mapped is None or self._mapped[0] != message["segment"]:
            # Pages that the trainer writes to become its own.
            self._mapped = message["segment"], mmap.mmap(fd, message["size"], access=mmap.ACCESS_COPY)
            # The batches' tensors refer to it.
            weakref.finalize(self._mapped[1], self._unmapped.append, message["segment"])
        return self._mapped[1], message["offset"]


def batch_number(cursor: Any, field: str = "cursor") -> int:
    """Return the number of the batch at a cursor."""
    number = cursor[0] if isinstance(cursor, (tuple, list)) and len(cursor) == 3 else cursor
    if type(number) is not int or number < 0:
        raise WeirError(f"expected the cursor of a batch, or its number, got {brief(cursor)}", field)
    return number
