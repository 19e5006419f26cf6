"""Results by reference: files with a lifetime and a byte budget, shared by all API-server processes of a server."""

from __future__ import annotations

import os
import re
import secrets
import struct
import time
from collections.abc import Collection
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import BinaryIO

from vllm_weir.errors import WeirError
from vllm_weir.results.activations import Activations
from vllm_weir.server.response_body import NOTHING
from vllm_weir.server.shared.directory import locked

SUFFIX, LOCK = ".safetensors", ".lock"
SPARE = 16
"""Where there is no room, this part of the budget is freed along: to look at every file for each result is slow."""
_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
_COUNT = struct.Struct("<q")


class ResultFiles:
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

    def put(
        self, acts: Activations, size: int, work: AbstractContextManager = NOTHING, spare: Collection[str] = ()
    ) -> str:
        """Write rows of about `size` bytes and return their id; the oldest results make room.

        Args:
            work: entered for what keeps the interpreter, and left while other writers are waited for.
            spare: ids that make no room: those of the same answer.

        Raises:
            WeirError: if they alone are larger than the budget, or the disk refuses them.
        """
        self._check(size)
        key = secrets.token_hex(16)
        temporary = self.directory / f".{key}"
        with work:
            pieces = acts.pieces()
        made = sum(map(len, pieces))
        try:
            # One writer at a time: what is kept never exceeds the budget.
            with locked(self._lock) as lock:
                kept = self._reserve(lock, made, spare)
                with open(temporary, "xb") as file:
                    file.writelines(pieces)
                self._count(lock, kept + made)
                os.replace(temporary, self._path(key))
        except OSError as e:
            raise WeirError(f"the server could not keep {size} bytes: {e.strerror}") from None
        finally:
            with suppress(OSError):  # it has its own name by now, or could not be made
                temporary.unlink()
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
            self._look(lock)

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

    def _reserve(self, lock: int, size: int, spare: Collection[str]) -> int:
        """Have room for so many bytes more; returns how many are kept at most."""
        self._check(size)
        kept = _number(os.pread(lock, _COUNT.size, 0))
        if kept is None or kept + size > self.budget:
            kept = self._look(lock, size, {f"{key}{SUFFIX}" for key in spare})
            if kept + size > self.budget:
                raise WeirError(
                    f"with the other results of this answer {size} bytes are more than the server keeps "
                    f"(WEIR_SERVE_SPOOL_BYTES={self.budget}); ask for less in one request"
                )
        return kept

    def _look(self, lock: int, size: int = 0, spare: Collection[str] = ()) -> int:
        """Remove what has expired, what a writer that was killed left, and, if `size` bytes more do not fit, the
        oldest until they do with room to spare; returns how many are kept. The lock is held: nobody writes."""
        now, held = time.time(), []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if entry.name == LOCK:
                    continue
                with suppress(FileNotFoundError):  # deleted by its reader
                    found = entry.stat(follow_symlinks=False)
                    if not entry.name.endswith(SUFFIX) or found.st_mtime + self.lifetime < now:
                        os.unlink(entry.path)
                        continue
                    held.append((found.st_mtime, found.st_size, entry.path))
        total = sum(made for _, made, _ in held)
        if total + size > self.budget:
            most = max(0, self.budget - self.budget // SPARE - size)
            for _, made, path in sorted(held):
                if total <= most:
                    break
                if os.path.basename(path) in spare:
                    continue
                with suppress(FileNotFoundError):
                    os.unlink(path)
                total -= made
        self._count(lock, total)
        return total

    def _count(self, lock: int, kept: int) -> None:
        os.pwrite(lock, _COUNT.pack(kept), 0)


def _number(data: bytes) -> int | None:
    """The count that stands in the lock's file; None where none does yet."""
    return _COUNT.unpack(data)[0] if len(data) == _COUNT.size else None


def is_id(key: str) -> bool:
    """Whether this can be an id: 32 hexadecimal digits, nothing that means a path."""
    return _ID.fullmatch(key) is not None
