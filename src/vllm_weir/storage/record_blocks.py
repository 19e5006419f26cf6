"""Where records lie: by byte offset in a file, or in an array that a file unpacks to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

import numpy as np

from vllm_weir.errors import WeirError
from vllm_weir.schema.compression import header_bytes
from vllm_weir.storage.object_store import ObjectStore

JOIN = 64 << 10
"""Ranges of a remote file that are this near are fetched as one."""
FETCH = 16 << 20
"""At most so many bytes are fetched as one range."""
MAPS = 64
"""So many files are mapped at a time: each holds a file descriptor, of which a process often has no more than 1024."""


class RecordBlock:
    """Records of one kind.

    Attributes:
        name: the file.
        header: of its records.
        width: bytes of a record.
        sealed: whether the file has checksums of its own, which `gather` compares.
    """

    sealed: ClassVar[bool] = False

    def __init__(self, store: ObjectStore, name: str, header: dict[str, Any]) -> None:
        self.store, self.name, self.header = store, name, header
        self.width = header_bytes(header)

    def gather(self, offsets: np.ndarray) -> np.ndarray:
        """The records that begin at `offsets` (int64 [n]): uint8 [n, width], a copy."""
        raise NotImplementedError

    def extent(self) -> int:
        """Bytes that offsets may point into."""
        raise NotImplementedError


class FileBlock(RecordBlock):
    """Records in a file, at byte offsets: mapped into memory if it is local, fetched by range if not."""

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
        if not len(offsets):
            return np.zeros((0, self.width), np.uint8)
        if self.store.local:
            data = self._map  # another thread may let go of it
            if data is None:
                data = self._map = self.store.map(self.name)
                self._let_others_go()
            if int(offsets.max()) + self.width > len(data):
                raise self.store.error(self.name, "has become shorter than its index says; it is truncated")
            return take(data, offsets, self.width)
        return self._fetch(offsets)

    def _let_others_go(self) -> None:
        FileBlock._mapped.append(ref(self))
        while len(FileBlock._mapped) > MAPS:
            oldest = FileBlock._mapped.popleft()()
            if oldest is not None:
                oldest._map = None

    def _fetch(self, offsets: np.ndarray) -> np.ndarray:
        order = np.argsort(offsets, kind="stable")
        at = offsets[order]
        starts, ends = [], []
        begin = end = int(at[0])
        for offset in at.tolist():
            if offset - end > JOIN or offset + self.width - begin > max(FETCH, self.width):
                starts.append(begin)
                ends.append(end)
                begin = offset
            end = max(end, offset + self.width)
        starts.append(begin)
        ends.append(end)
        out = np.empty((len(at), self.width), np.uint8)
        ranges = np.searchsorted(starts, at, side="right") - 1
        for i, data in enumerate(self.store.read_ranges(self.name, starts, ends)):
            if len(data) != ends[i] - starts[i]:
                raise self.store.error(self.name, "is shorter than its index says; it is truncated")
            mine = ranges == i
            out[order[mine]] = take(np.frombuffer(data, np.uint8), at[mine] - starts[i], self.width)
        return out


class ArrayBlock(RecordBlock):
    """Records that a file unpacks to (npz): unpacked at the first look, the last few kept. Offsets count in records."""

    # Weak, and by the block itself: ids are given again, and arrays go with their dataset.
    _recent: ClassVar[WeakKeyDictionary[ArrayBlock, np.ndarray]] = WeakKeyDictionary()
    KEEP = 8
    sealed = True  # a member of a zip file has a CRC-32

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
        recent = ArrayBlock._recent
        array = recent.pop(self, None)
        if array is None:
            array = self.unpack(self.store, self.name)
            if array.shape != (self.count, self.width) or array.dtype != np.uint8:
                raise self.store.error(self.name, "changed while it was open")
        recent[self] = array
        for old in list(recent)[: -self.KEEP]:
            recent.pop(old, None)
        return array[offsets // self.width]


def take(data: np.ndarray, offsets: np.ndarray, width: int) -> np.ndarray:
    """Slices of `width` bytes of uint8 [n] at byte offsets: uint8 [len(offsets), width], a copy."""
    first = int(offsets[0])
    if len(offsets) > 1 and first + len(offsets) * width <= len(data) and (np.diff(offsets) == width).all():
        return np.array(data[first : first + len(offsets) * width]).reshape(-1, width)
    windows = np.lib.stride_tricks.sliding_window_view(data, width)
    return np.ascontiguousarray(windows[offsets])


def check_inside(block: RecordBlock, offsets: np.ndarray, rows: np.ndarray, strides: np.ndarray) -> None:
    """Raises WeirError naming the file unless every run lies inside it."""
    if not len(offsets):
        return
    ends = offsets + np.maximum(rows - 1, 0) * strides + np.where(rows > 0, block.width, 0)
    if (offsets < 0).any() or (strides < 0).any() or (rows < 0).any():
        raise WeirError(f"{block.store.describe(block.name)}: its index has negative numbers")
    if int(ends.max()) > block.extent():
        raise block.store.error(
            block.name, f"truncated: its index reaches byte {int(ends.max())}, the file has {block.extent()}"
        )
