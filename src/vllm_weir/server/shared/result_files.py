"""Results by reference: files with a lifetime and a byte budget, shared by a server's processes."""

from __future__ import annotations

import os
import re
import secrets
import struct
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import BinaryIO

import torch

from vllm_weir.errors import WeirError
from vllm_weir.results.activations import Activations
from vllm_weir.server.response_body import NO_LOCK
from vllm_weir.server.shared.directory import locked
from vllm_weir.util.atomic_write import atomic_write

SUFFIX, FRAME_SUFFIX, LOCK = ".safetensors", ".zst", ".lock"
SLACK = 16
"""When results are removed to make room, 1/SLACK of the budget is freed in addition.

Making room looks at every file, which is too slow to do for each result.
"""
_ID = re.compile(r"[0-9a-f]{32}(?:-(?P<dtype>[a-z0-9]{1,16})-(?P<shape>\d{1,12}(?:x\d{1,12}){0,7}))?", re.ASCII)
"""Of a safetensors file, or of a zstd frame, which says by itself what it holds, and which its id therefore tells."""
_COUNT = struct.Struct("<q")


class ResultFiles:
    """Files ``<id>.safetensors`` and ``<id>.zst``. An id is random: whoever knows it has access.

    The lock file holds the number of bytes kept. Deletions are subtracted from it by the next scan
    of the files: at every `sweep`, and when there seems to be no room.

    Args:
        budget: The most bytes of all files.
        lifetime: Seconds for which a file is kept.
    """

    def __init__(self, directory: Path, budget: int, lifetime: float) -> None:
        self.directory, self.budget, self.lifetime = directory, budget, lifetime

    def put(
        self, acts: Activations, size: int, cpu_lock: AbstractContextManager = NO_LOCK, keep_ids: Collection[str] = ()
    ) -> str:
        """Write activations and return their id; the oldest results make room.

        Args:
            acts: The activations.
            size: About how many bytes they have.
            cpu_lock: Held while the file's bytes are made, not while other writers are waited for.
            keep_ids: Results that must not make room: those of the same response.

        Raises:
            WeirError: If the activations alone exceed the budget, or the disk refuses them.
        """
        self._check_budget(size)
        key = secrets.token_hex(16)
        with cpu_lock:
            pieces = acts.pieces()
        self._write(key, pieces, size, keep_ids)
        return key

    def put_frame(self, key: str, frame: bytes, keep_ids: Collection[str] = ()) -> None:
        """Write a zstd frame under a key of `frame_key`; `keep_ids` and errors are those of `put`."""
        self._write(key, [frame], len(frame), keep_ids)

    def _write(self, key: str, pieces: Sequence[bytes | memoryview], size: int, keep_ids: Collection[str]) -> None:
        file_size = sum(map(len, pieces))
        try:
            # With one writer at a time, the files never exceed the budget.
            with locked(self._lock) as lock:
                kept = self._make_room(lock, file_size, keep_ids)
                with atomic_write(self._path(key)) as file:
                    file.writelines(pieces)
                    file.flush()
                    self._write_count(lock, kept + file_size)
        except OSError as e:
            raise WeirError(f"the server could not store {size} bytes: {e.strerror}") from None

    def open(self, key: str) -> BinaryIO | None:
        """Open a result, readable even if it expires meanwhile; return None for an unknown id."""
        if not is_id(key):
            return None
        try:
            file = open(self._path(key), "rb")  # noqa: SIM115 - the caller closes it
        except FileNotFoundError:
            return None
        if time.time() > os.fstat(file.fileno()).st_mtime + self.lifetime:
            file.close()
            self.delete(key)
            return None
        return file

    def delete(self, key: str) -> bool:
        """Delete a result, and return whether there was one."""
        if not is_id(key):
            return False
        try:
            self._path(key).unlink()
        except FileNotFoundError:
            return False
        return True

    def sweep(self) -> None:
        with locked(self._lock) as lock:
            self._scan(lock)

    @property
    def used(self) -> int:
        try:
            return _parse_count(self._lock.read_bytes()) or 0
        except FileNotFoundError:
            return 0

    def __len__(self) -> int:
        return sum(name.endswith((SUFFIX, FRAME_SUFFIX)) for name in os.listdir(self.directory))

    @property
    def _lock(self) -> Path:
        return self.directory / LOCK

    def _path(self, key: str) -> Path:
        return self.directory / file_name(key)

    def _check_budget(self, size: int) -> None:
        if size > self.budget:
            raise WeirError(
                f"{size} bytes are more than the server keeps (WEIR_SERVE_SPOOL_BYTES={self.budget}); "
                "capture fewer blocks or positions, reduce, project or compress them, or name a sink"
            )

    def _make_room(self, lock: int, size: int, keep_ids: Collection[str]) -> int:
        """Make room for `size` more bytes and return how many are kept; the lock is held."""
        self._check_budget(size)
        kept = _parse_count(os.pread(lock, _COUNT.size, 0))
        if kept is None or kept + size > self.budget:
            kept = self._scan(lock, size, set(map(file_name, keep_ids)))
            if kept + size > self.budget:
                raise WeirError(
                    f"{size} bytes and the other results of this response are more than the server keeps "
                    f"(WEIR_SERVE_SPOOL_BYTES={self.budget}); ask for less in one request"
                )
        return kept

    def _scan(self, lock: int, size: int = 0, keep_names: Collection[str] = ()) -> int:
        """Remove expired files and those of killed writers, and count the bytes of the others.

        If `size` more bytes do not fit, the oldest files are removed until they do, with some
        slack. The lock is held, so nobody writes.

        Returns:
            The bytes that are kept.
        """
        now, kept = time.time(), []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if entry.name == LOCK:
                    continue
                with suppress(FileNotFoundError):  # deleted by its reader
                    status = entry.stat(follow_symlinks=False)
                    if not entry.name.endswith((SUFFIX, FRAME_SUFFIX)) or status.st_mtime + self.lifetime < now:
                        os.unlink(entry.path)
                        continue
                    kept.append((status.st_mtime, status.st_size, entry.path))
        total = sum(file_size for _, file_size, _ in kept)
        if total + size > self.budget:
            target = max(0, self.budget - self.budget // SLACK - size)
            for _, file_size, path in sorted(kept):
                if total <= target:
                    break
                if os.path.basename(path) in keep_names:
                    continue
                with suppress(FileNotFoundError):
                    os.unlink(path)
                total -= file_size
        self._write_count(lock, total)
        return total

    def _write_count(self, lock: int, kept: int) -> None:
        os.pwrite(lock, _COUNT.pack(kept), 0)


def _parse_count(data: bytes) -> int | None:
    return _COUNT.unpack(data)[0] if len(data) == _COUNT.size else None


def file_name(key: str) -> str:
    """Return the name of a result's file."""
    return f"{key}{FRAME_SUFFIX if is_frame(key) else SUFFIX}"


def is_id(key: str) -> bool:
    """Return whether this can be an id: 32 hexadecimal digits, for a frame dtype and shape; nothing that is a path."""
    return _ID.fullmatch(key) is not None


def is_frame(key: str) -> bool:
    return "-" in key


def frame_key(tensor: torch.Tensor) -> str:
    dtype, shape = str(tensor.dtype).removeprefix("torch."), "x".join(map(str, tensor.shape))
    return f"{secrets.token_hex(16)}-{dtype}-{shape}"


def frame_facts(key: str) -> tuple[str, list[int]]:
    """Return the dtype and the shape of the tensor in a frame, from its id."""
    match = _ID.fullmatch(key)
    assert match is not None and match["dtype"]
    return match["dtype"], [int(size) for size in match["shape"].split("x")]
