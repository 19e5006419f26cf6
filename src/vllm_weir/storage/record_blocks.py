"""Where records are stored: at byte offsets of a file, or in the array that a file unpacks to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.compression import header_bytes
from vllm_weir.storage.object_store import ObjectStore

MERGE_GAP = 64 << 10
"""Ranges of a remote file that are at most this many bytes apart are fetched as one."""
MAX_FETCH = 16 << 20
"""At most this many bytes are fetched as one range."""
MAX_MAPPED = 64
"""Files mapped at a time: each holds a file descriptor, of which a process often has no more than
1024."""


class RecordBlock:
    """Records of one kind in one file.

    Attributes:
        name: The file.
        header: Header of the records.
        width: Bytes of a record.
        has_own_checksums: Whether the file format has checksums, which `gather` compares.
    """

    has_own_checksums: ClassVar[bool] = False

    def __init__(self, store: ObjectStore, name: str, header: dict[str, Any]) -> None:
        self.store, self.name, self.header = store, name, header
        self.width = header_bytes(header)

    def gather(self, offsets: np.ndarray) -> np.ndarray:
        """Return a copy of the records that begin at `offsets` (int64 [n]): uint8 [n, width]."""
        raise NotImplementedError

    def extent(self) -> int:
        raise NotImplementedError


class FileBlock(RecordBlock):
    """Records at byte offsets of a file, which is mapped if local and else fetched by range."""

    _mapped: ClassVar[deque[ref[FileBlock]]] = deque()

    def __init__(self, store: ObjectStore, name: str, header: dict[str, Any], size: int) -> None:
        super().__init__(store, name, header)
        self.size = size
        self._map: np.ndarray | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_map": None}

    def extent(self) -> int:
        return self.size

    def gather(self, offsets: np.ndarray) -> np.ndarray:
        """Return a copy of the records that begin at `offsets` (int64 [n]): uint8 [n, width]."""
        if not len(offsets):
            return np.zeros((0, self.width), np.uint8)
        if self.store.local:
            data = self._map  # read once: another thread may unmap it
            if data is None:
                data = self._map = self.store.map(self.name)
                self._unmap_oldest()
            if int(offsets.max()) + self.width > len(data):
                raise self.store.error(self.name, "has become shorter than its index says; it is truncated")
            return take(data, offsets, self.width)
        return self._fetch(offsets)

    def _unmap_oldest(self) -> None:
        FileBlock._mapped.append(ref(self))
        while len(FileBlock._mapped) > MAX_MAPPED:
            oldest = FileBlock._mapped.popleft()()
            if oldest is not None:
                oldest._map = None

    def _fetch(self, offsets: np.ndarray) -> np.ndarray:
        order = np.argsort(offsets, kind="stable")
        ascending = offsets[order]
        starts, ends = self._ranges(ascending)
        records = np.empty((len(ascending), self.width), np.uint8)
        range_of = np.searchsorted(starts, ascending, side="right") - 1
        for i, data in enumerate(self.store.read_ranges(self.name, starts, ends)):
            if len(data) != ends[i] - starts[i]:
                raise self.store.error(self.name, "is shorter than its index says; it is truncated")
            inside = range_of == i
            records[order[inside]] = take(np.frombuffer(data, np.uint8), ascending[inside] - starts[i], self.width)
        return records

    def _ranges(self, ascending: np.ndarray) -> tuple[list[int], list[int]]:
        """Return starts and ends of byte ranges with all records, near ones merged."""
        starts, ends = [], []
        start = end = int(ascending[0])
        for offset in ascending.tolist():
            if offset - end > MERGE_GAP or offset + self.width - start > max(MAX_FETCH, self.width):
                starts.append(start)
                ends.append(end)
                start = offset
            end = max(end, offset + self.width)
        return [*starts, start], [*ends, end]


class ArrayBlock(RecordBlock):
    """Records that a file (npz) unpacks to on first use; a few are kept. Offsets are in bytes."""

    # Weak, so that arrays go with their dataset; by the block itself, since an id is used again
    # after its object.
    _recent: ClassVar[WeakKeyDictionary[ArrayBlock, np.ndarray]] = WeakKeyDictionary()
    KEEP = 8
    has_own_checksums = True  # a member of a zip file has a CRC-32
    readable = True

    def __init__(
        self,
        store: ObjectStore,
        name: str,
        header: dict[str, Any],
        count: int,
        unpack: Callable[[ObjectStore, str], np.ndarray],
    ) -> None:
        super().__init__(store, name, header)
        self.count, self.unpack = count, unpack

    def extent(self) -> int:
        return self.count * self.width

    def gather(self, offsets: np.ndarray) -> np.ndarray:
        """Return a copy of the records that begin at `offsets` (int64 [n]): uint8 [n, width]."""
        recent = ArrayBlock._recent
        array = recent.pop(self, None)
        if array is None:
            array = self.unpack(self.store, self.name)
            if array.shape != (self.count, self.width) or array.dtype != np.uint8:
                raise self.store.error(self.name, "changed while it was open")
        recent[self] = array
        for oldest in list(recent)[: -self.KEEP]:
            recent.pop(oldest, None)
        return array[offsets // self.width]


def take(data: np.ndarray, offsets: np.ndarray, width: int) -> np.ndarray:
    """Copy the `width` bytes at each offset of `data` (uint8 [bytes]): uint8 [n, width]."""
    first = int(offsets[0])
    if len(offsets) > 1 and first + len(offsets) * width <= len(data) and (np.diff(offsets) == width).all():
        return np.array(data[first : first + len(offsets) * width]).reshape(-1, width)
    windows = np.lib.stride_tricks.sliding_window_view(data, width)
    return np.ascontiguousarray(windows[offsets])


def check_inside(block: RecordBlock, offsets: np.ndarray, rows: np.ndarray, strides: np.ndarray) -> None:
    """Raise WeirError, naming the file, unless every run lies inside its block."""
    if not len(offsets):
        return
    ends = offsets + np.maximum(rows - 1, 0) * strides + np.where(rows > 0, block.width, 0)
    if (offsets < 0).any() or (strides < 0).any() or (rows < 0).any():
        raise WeirError(f"{block.store.describe(block.name)}: its index has negative numbers")
    if int(ends.max()) > block.extent():
        raise block.store.error(
            block.name, f"truncated: its index reaches byte {int(ends.max())}, the file has {block.extent()}"
        )
