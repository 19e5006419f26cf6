"""`ObjectStore`: files by name in a local folder or behind an fsspec URL.

Each file appears whole or not at all.
Every error of the operating system or of a store becomes a StoreError that names the file.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, BinaryIO

import numpy as np

from vllm_weir.errors import StoreError, WeirError
from vllm_weir.storage.atomic_file import (
    AtomicFile,
    LocalFiles,
    checked_url,
    local_path,
    remove_stale_files,
    remove_stale_uploads,
    store_errors,
)

BUCKET_PROTOCOLS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "oci", "oss", "r2"}
"""Protocols without folders: making a folder there could create a bucket."""


class ObjectStore:
    """Files under a URL, by name (``/`` separates folders); may be pickled, and used after a fork.

    Args:
        url: Local path or any fsspec URL (``s3://bucket/run``, ``memory://run``, ...).
        storage_options: Options of fsspec's file system for that protocol.
        fsync: Wait until a published file is on the disk (local only).

    Attributes:
        fs: `LocalFiles`, or fsspec's file system.
        local: Whether the files are local.
        root: Path of the folder as `fs` understands it.
        has_folders: False for object stores, which have none.
    """

    def __init__(
        self, url: str | PathLike, storage_options: dict[str, Any] | None = None, *, fsync: bool = False
    ) -> None:
        self.url = checked_url(url)
        self.options = _checked_options(storage_options)
        self.fsync = fsync
        self._connect()

    def _connect(self) -> None:
        self._pid = os.getpid()
        self.fs: Any = LocalFiles()
        root = local_path(self.url)
        self.local = root is not None
        if root is None:
            self.fs, root = _fsspec_of(self.url, self.options)
        self.root = root.rstrip("/")
        protocols = (self.fs.protocol,) if isinstance(self.fs.protocol, str) else self.fs.protocol
        self.has_folders = BUCKET_PROTOCOLS.isdisjoint(protocols)

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "options": self.options, "fsync": self.fsync}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._connect()

    def path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def describe(self, name: str) -> str:
        return self.path(name) if self.local else f"{self.url.rstrip('/')}/{name}".rstrip("/")

    def error(self, name: str, message: str) -> WeirError:
        return WeirError(f"{self.describe(name)}: {message}")

    @contextlib.contextmanager
    def store_errors(self, action: str, name: str) -> Iterator[None]:
        """Raise any error of the file system as a StoreError that names the file.

        File systems of fsspec have kinds of errors of their own beside OSError.
        """
        with store_errors(action, self.describe(name)):
            try:
                yield
            except (OSError, WeirError):
                raise
            except Exception as e:
                raise StoreError(f"cannot {action} {self.describe(name)}: {type(e).__name__}: {str(e)[:200]}") from e

    def names(self, *, deep: bool = False, folder_prefix: str = "") -> dict[str, int]:
        """Return the published files and their sizes in bytes, without hidden and temporary ones.

        `deep`: Also list files in folders; `folder_prefix`: List only those folders whose names begin so.
        """
        if self.local:
            try:
                return self.fs.find(self.root, deep=deep, folder_prefix=folder_prefix)
            except (FileNotFoundError, NotADirectoryError):
                return {}
            except OSError as e:
                raise StoreError(f"cannot list {e.filename or self.describe('')}: {e.strerror or e}") from e
        self._forget_listings()
        with self.store_errors("list", ""):
            try:
                found = self.fs.find(self.root, maxdepth=None if deep else 1, detail=True)
            except FileNotFoundError:
                return {}
        sizes = {}
        for path, info in found.items():
            name = posixpath.relpath(path, self.root)
            hidden = any(part.startswith(".") for part in name.split("/"))
            if name != "." and not hidden and ("/" not in name or name.startswith(folder_prefix)):
                sizes[name] = int(info["size"] or 0)
        return sizes

    def is_file(self) -> bool:
        self._forget_listings()
        with self.store_errors("open", ""):
            return bool(self.fs.isfile(self.root))

    def exists(self) -> bool:
        self._forget_listings()
        with self.store_errors("open", ""):
            return bool(self.fs.exists(self.root))

    def make_folder(self) -> None:
        if self.has_folders:
            with self.store_errors("create", ""):
                self.fs.makedirs(self.root, exist_ok=True)

    def size(self, name: str) -> int:
        self._forget_listings()
        with self.store_errors("open", name):
            return int(self.fs.size(self.path(name)) or 0)

    def open(self, name: str, compression: str | None = None) -> BinaryIO:
        self._reconnect_after_fork()
        return self.fs.open(self.path(name), "rb", compression=compression)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        self._reconnect_after_fork()
        with self.store_errors("read", name):
            return self.fs.cat_file(self.path(name), start=start, end=end)

    def read_ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        """Return several byte ranges of one file, fetched together where the store can."""
        self._reconnect_after_fork()
        with self.store_errors("read", name):
            return self.fs.cat_ranges([self.path(name)] * len(starts), list(starts), list(ends), on_error="raise")

    def map(self, name: str) -> np.ndarray:
        """Map a local file into memory: uint8 [bytes], read-only."""
        with self.store_errors("map", name):
            if os.path.getsize(self.path(name)) == 0:
                return np.zeros(0, np.uint8)
            return np.memmap(self.path(name), np.uint8, "r")

    def put(self, name: str, data: bytes) -> None:
        file = self.new_file(name)
        try:
            file.write(data)
            file.publish()
        except Exception:
            file.discard()
            raise

    def new_file(self, name: str) -> AtomicFile:
        return AtomicFile(self, name)

    def upload(self, path: str, name: str) -> None:
        self._reconnect_after_fork()
        if self.has_folders:
            self.fs.makedirs(posixpath.dirname(self.path(name)), exist_ok=True)
        self.fs.put_file(path, self.path(name))

    def remove(self, name: str) -> None:
        with self.store_errors("delete", name):
            self.fs.rm_file(self.path(name))

    def sweep(self, folder_prefix: str | None = None) -> None:
        """Delete temporary files whose writers have died, in the folder or of uploads.

        `folder_prefix`: Also look in those folders of a local store whose names begin so; None for no folder.
        """
        if self.local:
            remove_stale_files(self.root, folder_prefix)
        else:
            remove_stale_uploads()

    def _forget_listings(self) -> None:
        """Drop fsspec's cached listings, which lack files that others have written since."""
        self._reconnect_after_fork()
        self.fs.invalidate_cache()

    def _reconnect_after_fork(self) -> None:
        """Open the file system again in a forked process, which must not share connections."""
        if self._pid != os.getpid():
            self._connect()


def _fsspec_of(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as e:
        raise WeirError(f"cannot open {url}: it needs fsspec: pip install 'vllm-weir[keep]'") from e
    try:
        return url_to_fs(url, **options)
    except (ValueError, TypeError, ImportError) as e:
        raise WeirError(f"cannot open {url}: {e}") from e


def _checked_options(options: object) -> dict[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise WeirError("expected a dict whose keys are names of options", "storage_options")
    return dict(options)
