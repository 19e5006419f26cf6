"""Results by reference in a bucket that several servers share: each server answers for those of all."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from vllm_weir.errors import WeirError
from vllm_weir.server.shared.result_files import SLACK, ResultFiles, file_name, is_id
from vllm_weir.server.shared.store import Store

_FOLDER = "results"


class StoreResults(ResultFiles):
    """Results as objects ``results/<id>.safetensors`` and ``results/<id>.zst``.

    Servers count each other's results at every `sweep` only, so together they may keep more than
    the budget until then.

    Args:
        directory: for copies, which are on their way.
    """

    def __init__(self, store: Store, directory: Path, budget: int, lifetime: float) -> None:
        super().__init__(directory, budget, lifetime)
        self._store, self._used, self._counting = store, 0, threading.Lock()

    def _write(self, key: str, pieces: Sequence[bytes | memoryview], size: int, keep_ids: Collection[str]) -> None:
        file_size = sum(map(len, pieces))
        path = self.directory / f".{secrets.token_hex(8)}.tmp"
        try:
            with self._counting:
                self._check_budget(file_size)
                if self._used + file_size > self.budget:
                    self._remove_old(file_size, set(map(_name, keep_ids)))
                self._used += file_size
            with open(path, "xb") as file:
                file.writelines(pieces)
            self._store.upload(path, _name(key))
        except OSError as e:
            raise WeirError(f"the server could not store {size} bytes: {e.strerror or type(e).__name__}") from None
        finally:
            path.unlink(missing_ok=True)

    def open(self, key: str) -> BinaryIO | None:
        """Open a copy of a result, readable even if it expires meanwhile; return None for an unknown id."""
        if not is_id(key):
            return None
        path = self.directory / f".{secrets.token_hex(8)}.tmp"
        try:
            if self._store.modified(_name(key)) + self.lifetime < time.time():
                self.delete(key)
                return None
            self._store.download(_name(key), path)
            return open(path, "rb")
        except FileNotFoundError:
            return None
        finally:
            path.unlink(missing_ok=True)

    def delete(self, key: str) -> bool:
        """Delete a result, and return whether there was one."""
        return is_id(key) and self._store.remove(_name(key))

    def sweep(self) -> None:
        """Remove expired results."""
        with self._counting:
            self._remove_old(0, set())

    @property
    def used(self) -> int:
        """Bytes of all results at the last sweep, and of this server's since."""
        return self._used

    def __len__(self) -> int:
        return len(self._store.files(_FOLDER))

    def _remove_old(self, size: int, keep_names: Collection[str]) -> None:
        """Remove expired results, and if `size` more bytes do not fit the oldest until they do, with some slack."""
        files = sorted((modified, name, bytes_) for name, (modified, bytes_) in self._store.files(_FOLDER).items())
        used = sum(bytes_ for _, _, bytes_ in files)
        target = self.budget if used + size <= self.budget else max(0, self.budget - self.budget // SLACK - size)
        for modified, name, bytes_ in files:
            expired = modified + self.lifetime < time.time()
            if expired or (used > target and name not in keep_names):
                with suppress(FileNotFoundError):  # another server removed it
                    self._store.remove(name)
                used -= bytes_
        self._used = used
        if used + size > self.budget:
            raise WeirError(
                f"{size} bytes and the other results of this response are more than the server keeps "
                f"(WEIR_SERVE_SPOOL_BYTES={self.budget}); ask for less in one request"
            )


def _name(key: str) -> str:
    return f"{_FOLDER}/{file_name(key)}"
