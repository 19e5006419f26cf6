"""Results by reference: files with a lifetime and a byte budget, shared by all API-server processes of a server."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from vllm_weir.errors import WeirError
from vllm_weir.frontend.activations import Activations
from vllm_weir.serve.home import locked

SUFFIX, LOCK = ".safetensors", ".lock"
_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


class Spool:
    """Files ``<id>.safetensors``; an id is random, and knowing it is what gives access.

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
            with locked(self.directory / LOCK):
                self._make_room(size)
                self._clear()
                _save(acts, temporary, size)
                self._make_room(temporary.stat().st_size)
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
        with locked(self.directory / LOCK):
            self._make_room(0)
            self._clear()

    @property
    def used(self) -> int:
        """Bytes of all results."""
        return sum(size for _, size, _ in self._files())

    def __len__(self) -> int:
        return sum(1 for _ in self._files())

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}{SUFFIX}"

    def _check(self, size: int) -> None:
        if size > self.budget:
            raise WeirError(
                f"{size} bytes are more than the server keeps (WEIR_SERVE_SPOOL_BYTES={self.budget}); "
                "capture fewer blocks or positions, reduce, project or compress them, or name a sink"
            )

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX):
                    with suppress(FileNotFoundError):  # deleted by its reader
                        found = entry.stat(follow_symlinks=False)
                        yield found.st_mtime, found.st_size, Path(entry.path)

    def _make_room(self, size: int) -> None:
        self._check(size)
        now, held = time.time(), sorted(self._files())
        total = sum(n for _, n, _ in held) + size
        for made, n, path in held:
            if made + self.lifetime >= now and total <= self.budget:
                break
            path.unlink(missing_ok=True)
            total -= n

    def _clear(self) -> None:
        """Remove what a writer that was killed left; the lock is held, so nobody writes."""
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if entry.name != LOCK and not entry.name.endswith(SUFFIX):
                    Path(entry.path).unlink(missing_ok=True)


def _save(acts: Activations, path: Path, size: int) -> None:
    try:
        acts.save(path)
    except WeirError as e:  # a client is told why, and no path of the server
        reason = e.message.partition(f"{path}: ")[2]
        raise WeirError(f"the server could not keep {size} bytes: {reason}") from None


def is_id(key: str) -> bool:
    """Whether this can be an id: 32 hexadecimal digits, nothing that means a path."""
    return _ID.fullmatch(key) is not None
