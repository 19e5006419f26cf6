"""`RowBatch` and `Cursor`, and how a batch lies in memory."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from vllm_weir.schema.compression import STORED_DTYPES
from vllm_weir.schema.hooks import Site

ALIGN = 4096
"""Tensors of a batch begin at multiples of this, so that what a trainer changes in its view of one page changes no
other batch's."""
_DTYPES = {name: getattr(torch, name) for name in (*STORED_DTYPES, "int64")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Cursor(NamedTuple):
    """How far a stream has been read: what comes next. Plain numbers, to be stored with a checkpoint.

    Attributes:
        batch: Number of the next batch.
        request: Number of the request whose rows the next batch begins with.
        row: The first of its rows in that batch.
    """

    batch: int = 0
    request: int = 0
    row: int = 0


class RowBatch(NamedTuple):
    """Rows of consecutive requests.

    Attributes:
        rows: Site -> [n, d_model], or [n, *shape] of a point with another shape, in the capture's dtype.
        positions: Position of each row in its request, int64 [n].
        token_ids: The token there, int64 [n].
        requests: Number of each row's request, int64 [n].
        cursor: What comes after this batch.
    """

    rows: dict[Any, torch.Tensor]
    positions: torch.Tensor
    token_ids: torch.Tensor
    requests: torch.Tensor
    cursor: Cursor


Tensors = dict[str, torch.Tensor]
"""The tensors of a batch: ``"positions"``, ``"token_ids"``, ``"requests"``, and rows as ``"hook.layer"``."""


class BatchLayout:
    """Where the tensors of a batch of up to `rows` rows lie in a piece of memory.

    Attributes:
        nbytes: Of all of them.
    """

    def __init__(self, like: Mapping[str, torch.Tensor], rows: int) -> None:
        self._tensors: dict[str, tuple[torch.dtype, tuple[int, ...], int]] = {}
        self.nbytes = 0
        for name, tensor in like.items():
            shape = tuple(tensor.shape[1:])
            self._tensors[name] = (tensor.dtype, shape, self.nbytes)
            size = rows * torch.Size(shape).numel() * tensor.dtype.itemsize
            self.nbytes += -(-size // ALIGN) * ALIGN

    def matches(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether these have the dtypes and shapes of the layout."""
        return {n: (t.dtype, tuple(t.shape[1:])) for n, t in tensors.items()} == {
            n: (dtype, shape) for n, (dtype, shape, _) in self._tensors.items()
        }

    def header(self, rows: int) -> list[list[Any]]:
        """Return name, dtype, shape and offset of each tensor, as `read_tensors` takes them."""
        return [[n, _NAMES[dtype], [rows, *shape], offset] for n, (dtype, shape, offset) in self._tensors.items()]


def read_tensors(memory: mmap.mmap | torch.Tensor, offset: int, header: list[list[Any]]) -> Tensors:
    """Return views of the tensors of a batch that begins at `offset` of the memory."""
    found = {}
    for name, dtype, shape, start in header:
        count = torch.Size(shape).numel()
        if not count:
            found[str(name)] = torch.empty(shape, dtype=_DTYPES[dtype])
            continue
        flat = torch.frombuffer(
            memory if isinstance(memory, mmap.mmap) else memory.numpy(),
            dtype=_DTYPES[dtype], count=count, offset=offset + start,
        )  # fmt: skip
        found[str(name)] = flat.view(shape)
    return found


def batch_of(tensors: Tensors, cursor: list[int]) -> RowBatch:
    """Return the batch of these tensors."""
    rest = dict(tensors)
    positions, token_ids, requests = (rest.pop(name) for name in ("positions", "token_ids", "requests"))
    rows = {Site(hook, int(layer)): tensor for name, tensor in rest.items() for hook, layer in [name.rsplit(".", 1)]}
    return RowBatch(rows, positions, token_ids, requests, Cursor(*cursor))
