"""Results by reference: files with a lifetime and a byte budget, shared by all API-server processes of a server."""

from __future__ import annotations

import os
import re
import secrets
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from vllm_weir.errors import WeirError
from vllm_weir.frontend.activations import Activations
from vllm_weir.serve.home import locked

SUFFIX, LOCK = ".safetensors", ".lock"
SPARE = 16
"""Where there is no room, this part of the budget is freed along: to look at every file for each result is slow."""
_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
_COUNT = struct.Struct("<q")


class Spool:
    """Files ``<id>.safetensors``; an id is random, and knowing it is what gives access.

    How many bytes are kept stands in the file that is locked; what readers delete is taken off when the files are
    looked at, which is when there seems to be no room, and at every `sweep`.

    Args:
        directory: where they lie; for this only.
        budget: bytes of all of them.
        lifetime: seconds that one is kept.
    """

    def __init__(self, directory: Path, budget: int, lifetime: float) -> None:
        self.directory, self.budget, self.lifetime = directory, budget, lifetime

    def put(self, acts: Activations, size: int) -> str:
        """Write rows of about `size` bytes and return their id; the oldest results make room.

        Raises:
            WeirError: if they alone are larger than the budget, or the disk refuses them.
        """
        key = secrets.token_hex(16)
        temporary = self.directory / f".{key}"
        try:
            # One writer at a time: what is kept never exceeds the budget.
            with locked(self._lock) as lock:
                self._reserve(lock, size, temporary.name)
                _save(acts, temporary, size)
                made = temporary.stat().st_size
                self._count(lock, self._reserve(lock, made, temporary.name) + made)
                os.replace(temporary, self._path(key))
        except OSError as e:
            raise WeirError(f"the server could not keep {size} bytes: {e.strerror}") from None
        finally:
            temporary.unlink(missing_ok=True)
        return key

    def open(self, key: str) -> BinaryIO | None:
        """The file, readable also when it expires meanwhile; None for an id that is unknown, expired or none."""
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
        """Free a result early; whether there was one."""
        if not is_id(key):
            return False
        try:
            self._path(key).unlink()
        except FileNotFoundError:
            return False
        return True

    def sweep(self) -> None:
        """Remove what has expired."""
        with locked(self._lock) as lock:
            self._look(lock, self.budget)

    @property
    def used(self) -> int:
        """Bytes of all results, those that were deleted since the last `sweep` included."""
        try:
            return _number(self._lock.read_bytes()) or 0
        except FileNotFoundError:
            return 0

    def __len__(self) -> int:
        return sum(name.endswith(SUFFIX) for name in os.listdir(self.directory))

    @property
    def _lock(self) -> Path:
        return self.directory / LOCK

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}{SUFFIX}"

    def _check(self, size: int) -> None:
        if size > self.budget:
            raise WeirError(
                f"{size} bytes are more than the server keeps (WEIR_SERVE_SPOOL_BYTES={self.budget}); "
                "capture fewer blocks or positions, reduce, project or compress them, or name a sink"
            )

    def _reserve(self, lock: int, size: int, own: str) -> int:
        """Have room for so many bytes more, those of the file `own`; returns how many are kept at most."""
        self._check(size)
        kept = _number(os.pread(lock, _COUNT.size, 0))
        if kept is None or kept + size > self.budget:
            kept = self._look(lock, max(0, self.budget - self.budget // SPARE - size), own)
        return kept

    def _look(self, lock: int, most: int, own: str = "") -> int:
        """Remove what has expired, what a writer that was killed left, and the oldest until at most `most` bytes are
        kept; returns how many are. The lock is held: nobody writes, but for the file `own`."""
        now, total, held = time.time(), 0, []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if entry.name in (LOCK, own):
                    continue
                with suppress(FileNotFoundError):  # deleted by its reader
                    if not entry.name.endswith(SUFFIX):
                        os.unlink(entry.path)
                        continue
                    found = entry.stat(follow_symlinks=False)
                    held.append((found.st_mtime, found.st_size, entry.path))
                    total += found.st_size
        for made, size, path in sorted(held):
            if made + self.lifetime >= now and total <= most:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
        self._count(lock, total)
        return total

    def _count(self, lock: int, kept: int) -> None:
        os.pwrite(lock, _COUNT.pack(kept), 0)


def _number(data: bytes) -> int | None:
    """The count that stands in the lock's file; None where none does yet."""
    return _COUNT.unpack(data)[0] if len(data) == _COUNT.size else None


def _save(acts: Activations, path: Path, size: int) -> None:
    try:
        acts.save(path)
    except WeirError as e:  # a client is told why, and no path of the server
        reason = e.message.partition(f"{path}: ")[2]
        raise WeirError(f"the server could not keep {size} bytes: {reason}") from None


def is_id(key: str) -> bool:
    """Whether this can be an id: 32 hexadecimal digits, nothing that means a path."""
    return _ID.fullmatch(key) is not None
