"""`BatchWriter`: joins the rows of requests, one after the other, to the batches of a stream."""

from __future__ import annotations

import torch

from vllm_weir.errors import WeirError
from vllm_weir.streaming.batches import BatchLayout, Cursor, Tensors
from vllm_weir.streaming.sender import RowSender


class BatchWriter:
    """Joins the rows of requests, in order, to batches.

    Attributes:
        request: Number of the next request.
    """

    def __init__(self, sender: RowSender, batch_size: int | None, start: Cursor) -> None:
        self._sender, self._size = sender, batch_size
        self._batch, self.request, self._skip = start
        self._layout: BatchLayout | None = None
        self._open: tuple[Tensors, int] | None = None
        self._rows = 0

    def add(self, tensors: Tensors) -> None:
        """Add the rows of the next request; raise WeirError if they are unlike those before."""
        count = len(tensors["positions"])
        tensors = {**tensors, "requests": torch.full((count,), self.request)}
        row, self._skip = self._skip, 0
        if row > count:
            raise WeirError(f"request {self.request} has {count} rows, so that these are other requests", "start")
        if self._size is not None and self._layout is not None and not self._layout.matches(tensors):
            raise WeirError(
                f"request {self.request} captures other sites, shapes or dtypes than those before it; give all the "
                "same capture, or set batch_size=None for a batch for each request",
                "requests",
            )
        while row < count:
            size = self._size or count
            if self._open is None:
                self._reserve(tensors, size)
            assert self._open is not None
            part = min(count - row, size - self._rows)
            for name, written in self._open[0].items():
                written[self._rows : self._rows + part] = tensors[name][row : row + part]
            self._rows, row = self._rows + part, row + part
            if self._rows == size:
                self._publish(Cursor(self._batch + 1, *((self.request, row) if row < count else (self.request + 1, 0))))
        self.request += 1

    def flush(self) -> None:
        """Publish the last batch, which may be short."""
        if self._open is not None:
            self._publish(Cursor(self._batch + 1, self.request, 0))

    def _reserve(self, tensors: Tensors, size: int) -> None:
        if self._layout is None or self._size is None:
            self._layout = BatchLayout(tensors, size)
        self._open = self._sender.reserve(self._layout, size)

    def _publish(self, cursor: Cursor) -> None:
        assert self._open is not None and self._layout is not None
        self._sender.publish(self._layout, self._open[1], self._rows, cursor)
        self._batch, self._open, self._rows = cursor.batch, None, 0
