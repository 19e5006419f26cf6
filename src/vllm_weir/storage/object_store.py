"""A directory, or an object store behind an fsspec URL, in which files appear whole or not at all.

Locally a file is written under a hidden temporary name and renamed; on an object store it is collected in a local
temporary file and sent with one put. Every error of the operating system or of a store becomes a StoreError that names
the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import posixpath
import re
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np

from vllm_weir.errors import MissingFile, StoreError, WeirError
from vllm_weir.storage.local_files import LocalFiles, local_path

OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "oci", "oss", "r2"}
"""Stores without folders; to make one there could make a bucket."""

REMOTE = "weir-upload"
"""What a file on its way to a remote store is called, in the folder of temporary files."""

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp", re.DOTALL)
"""What a `AtomicFile` calls a local file in the making."""

_NO_RESERVING = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)

PIECE = 1 << 20
"""Bytes of one call that writes: for larger ones ext4 looks for long runs of free memory, at times slowly."""


@contextlib.contextmanager
def naming(action: str, file: str) -> Iterator[None]:
    """Turns an OSError inside into a StoreError that names `file`; MissingFile if it is not there."""
    try:
        yield
    except WeirError:
        raise
    except OSError as e:
        kind = MissingFile if isinstance(e, FileNotFoundError) else StoreError
        raise kind(f"cannot {action} {file}: {e.strerror or e}") from e


def split_url(url: str) -> tuple[str, str]:
    """(URL of the folder, name) of a file's URL."""
    if "://" not in url:
        folder, _, name = url.rpartition("/")
        return folder or ("/" if url.startswith("/") else "."), name
    # Of a chain of file systems (zip://rows.npz::s3://bucket/a.zip) the path is in the first link that has one.
    links = url.split("::")
    place = next(i for i, link in enumerate(links) if "://" in link)
    protocol, _, path = links[place].partition("://")
    folder, _, name = path.rpartition("/")
    links[place] = f"{protocol}://{folder or ('/' if path.startswith('/') else '')}"
    return "::".join(links), name


class ObjectStore:
    """Files under a URL, by name (``/`` separates folders).

    Args:
        url: local path or any fsspec URL (``s3://bucket/run``, ``memory://run``, ...).
        storage_options: for fsspec's file system of that protocol.
        fsync: wait until a published file is on the disk (local only).

    Raises:
        WeirError: naming what is wrong.
    """

    def __init__(
        self, url: str | PathLike, storage_options: dict[str, Any] | None = None, *, fsync: bool = False
    ) -> None:
        self.url = _checked_url(url)
        self.options = _checked_options(storage_options)
        self.fsync = fsync
        self._open()

    def _open(self) -> None:
        self._pid = os.getpid()
        self.fs: Any = LocalFiles()
        root = local_path(self.url)
        self.local = root is not None
        if root is None:
            self.fs, root = _remote(self.url, self.options)
        self.root = root.rstrip("/")
        protocols = (self.fs.protocol,) if isinstance(self.fs.protocol, str) else self.fs.protocol
        self.bucket = not OBJECT_STORES.isdisjoint(protocols)

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "options": self.options, "fsync": self.fsync}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def path(self, name: str) -> str:
        """The path of a file, as the file system understands it."""
        return f"{self.root}/{name}" if name else self.root

    def describe(self, name: str) -> str:
        """The file as error messages name it."""
        return self.path(name) if self.local else f"{self.url.rstrip('/')}/{name}".rstrip("/")

    def fail(self, name: str, message: str) -> WeirError:
        """An error about a file's content."""
        return WeirError(f"{self.describe(name)}: {message}")

    @contextlib.contextmanager
    def asking(self, action: str, name: str) -> Iterator[None]:
        """As `naming`, around calls of the file system; those for object stores have errors of their own, too."""
        with naming(action, self.describe(name)):
            try:
                yield
            except (OSError, WeirError):
                raise
            except Exception as e:
                raise StoreError(f"cannot {action} {self.describe(name)}: {type(e).__name__}: {str(e)[:200]}") from e

    def names(self, *, deep: bool = False, folders: str = "") -> dict[str, int]:
        """Published files and their bytes; hidden and temporary ones are left out.

        Args:
            deep: also what is in folders.
            folders: of the folders, only those whose names begin so; the others are not looked into.
        """
        if self.local:
            try:
                return self.fs.find(self.root, deep=deep, folders=folders)
            except (FileNotFoundError, NotADirectoryError):
                return {}
            except OSError as e:
                raise StoreError(f"cannot list {e.filename or self.describe('')}: {e.strerror or e}") from e
        self._look()
        with self.asking("list", ""):
            try:
                found = self.fs.find(self.root, maxdepth=None if deep else 1, detail=True)
            except FileNotFoundError:
                return {}
        out = {}
        for path, info in found.items():
            name = posixpath.relpath(path, self.root)
            hidden = any(part.startswith(".") for part in name.split("/"))
            if name != "." and not hidden and ("/" not in name or name.startswith(folders)):
                out[name] = int(info["size"] or 0)
        return out

    def is_file(self) -> bool:
        """Whether the URL is a file rather than a folder."""
        self._look()
        with self.asking("open", ""):
            return bool(self.fs.isfile(self.root))

    def exists(self) -> bool:
        """Whether there is anything at the URL."""
        self._look()
        with self.asking("open", ""):
            return bool(self.fs.exists(self.root))

    def make(self) -> None:
        """Make the folder."""
        if not self.bucket:
            with self.asking("create", ""):
                self.fs.makedirs(self.root, exist_ok=True)

    def size(self, name: str) -> int:
        """Bytes of a file."""
        self._look()
        with self.asking("open", name):
            return int(self.fs.size(self.path(name)) or 0)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """A file's bytes, from `start` up to `end`."""
        self._refresh()
        with self.asking("read", name):
            return self.fs.cat_file(self.path(name), start=start, end=end)

    def read_ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        """Several ranges of one file, fetched together where the store can."""
        self._refresh()
        with self.asking("read", name):
            return self.fs.cat_ranges([self.path(name)] * len(starts), list(starts), list(ends), on_error="raise")

    def map(self, name: str) -> np.ndarray:
        """A local file as uint8 [bytes], mapped into memory, read-only."""
        with self.asking("map", name):
            if os.path.getsize(self.path(name)) == 0:
                return np.zeros(0, np.uint8)
            return np.memmap(self.path(name), np.uint8, "r")

    def put(self, name: str, data: bytes) -> None:
        """Publish a small file."""
        spool = self.spool(name)
        try:
            spool.write(data)
            spool.publish()
        except Exception:
            spool.discard()
            raise

    def remove(self, name: str) -> None:
        """Delete a file."""
        with self.asking("delete", name):
            self.fs.rm_file(self.path(name))

    def spool(self, name: str) -> AtomicFile:
        """A file in the making."""
        return AtomicFile(self, name)

    def sweep(self, folders: str | None = None) -> None:
        """Delete temporary files whose writers are gone: in the folder, or what was on its way to a remote one.

        `folders`: also in those of its folders, and below, whose names begin so; None for none.
        """
        if not self.local:
            for path in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), f".{REMOTE}.*.tmp")):
                _remove_if_stale(path)
            return
        for folder, below, files in os.walk(self.root):
            if folder == self.root:
                below[:] = [name for name in below if folders is not None and name.startswith(folders)]
            for file in files:
                if _TEMPORARY.fullmatch(file):
                    _remove_if_stale(os.path.join(folder, file))

    def _look(self) -> None:
        """What is there now is asked for: fsspec keeps listings, in which what others have written since is missing."""
        self._refresh()
        self.fs.invalidate_cache()

    def _refresh(self) -> None:
        """A forked process gets its own file system: connections must not be shared."""
        if self._pid != os.getpid():
            self._open()


def _remote(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    """(fsspec's file system, path in it) of a URL."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as e:
        raise WeirError(f"cannot open {url}: it needs fsspec: pip install 'vllm-weir[keep]'") from e
    try:
        return url_to_fs(url, **options)
    except (ValueError, TypeError, ImportError) as e:  # an unknown protocol or option, or a package is missing
        raise WeirError(f"cannot open {url}: {e}") from e


def _checked_url(url: object) -> str:
    """A path or URL as text; an empty one would be the current directory."""
    text = os.fspath(url) if isinstance(url, (str, PathLike)) else None
    if not isinstance(text, str):
        raise WeirError(f"a path or a URL is text, got {type(url).__name__}", "url")
    if "\0" in text:
        raise WeirError("no path holds a NUL", "url")
    if not text:
        raise WeirError("it is empty; the current directory is '.'", "url")
    return text


def _checked_options(options: object) -> dict[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise WeirError("a dict whose keys are the names of options", "storage_options")
    return dict(options)


class AtomicFile:
    """A file in the making: written piece by piece, then published under its name in one step."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self.store, self.name, self.size, self._room = store, name, 0, 0
        self.file = store.describe(name)
        with naming("write", self.file):
            folder, base, mode = tempfile.gettempdir(), REMOTE, 0o600
            if store.local:
                folder, base = os.path.split(store.path(name))
                os.makedirs(folder, exist_ok=True)
                mode = 0o644
            self._fd = -1
            while self._fd < 0:
                self.temporary = os.path.join(folder, f".{base}.{secrets.token_hex(4)}.tmp")
                self._fd = _create(self.temporary, mode)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append; after an error the file is as it was before."""
        with naming("write", self.file):
            try:
                _write_all(self._fd, memoryview(data).cast("B"), self.size)
            except OSError:
                self._cut()
                raise
        written = memoryview(data).nbytes
        if self.store.local and self.store.fsync and hasattr(os, "posix_fadvise"):
            # Has the kernel begin to write it out now, so that the disk is at work before the file is published.
            os.posix_fadvise(self._fd, self.size, written, os.POSIX_FADV_DONTNEED)
        self.size += written

    def reserve(self, size: int) -> bool:
        """Have the disk set aside what the file lacks to `size` bytes, so that it has room for them when they come.

        Not while another thread writes: the C library may do it by writing, too. Returns False where a file system
        cannot do it at all, so that only writing finds out; raises StoreError if the disk is full.
        """
        if size <= max(self.size, self._room):
            return True
        if not hasattr(os, "posix_fallocate"):
            return False
        with naming("write", self.file):
            try:
                self._grow(-(-size // PIECE) * PIECE)  # seldom, while there is room
            except OSError as e:
                if e.errno in _NO_RESERVING:
                    return False
                self._grow(size)
        return True

    def _grow(self, size: int) -> None:
        start = max(self.size, self._room)
        try:
            os.posix_fallocate(self._fd, start, size - start)
        except OSError:
            os.ftruncate(self._fd, start)
            raise
        self._room = size

    def write_at(self, offset: int, data: bytes) -> None:
        """Overwrite bytes that were written already."""
        with naming("write", self.file):
            _write_all(self._fd, memoryview(data), offset)

    def truncate(self, size: int) -> None:
        """Drop what was written after the first `size` bytes."""
        with naming("write", self.file):
            os.ftruncate(self._fd, size)
        self.size, self._room = size, 0

    def publish(self) -> None:
        """Make the file visible under its name, whole. After an error it may be tried again."""
        with self.store.asking("write", self.name):
            if self._room > self.size:
                self._cut()
            if self.store.local:
                if self.store.fsync:
                    os.fsync(self._fd)
                os.replace(self.temporary, self.store.path(self.name))
                if self.store.fsync:
                    try:
                        _sync_folder(os.path.dirname(self.store.path(self.name)))
                    except OSError:
                        os.replace(self.store.path(self.name), self.temporary)
                        raise
                os.close(self._fd)
            else:
                self.store._refresh()
                if not self.store.bucket:
                    self.store.fs.makedirs(posixpath.dirname(self.store.path(self.name)), exist_ok=True)
                self.store.fs.put_file(self.temporary, self.store.path(self.name))
                os.close(self._fd)
                os.unlink(self.temporary)

    def _cut(self) -> None:
        """The file ends where what was written ends."""
        os.ftruncate(self._fd, self.size)
        self._room = 0

    def discard(self) -> None:
        """Drop the file."""
        with naming("delete", self.temporary), contextlib.suppress(FileNotFoundError):
            os.close(self._fd)
            os.unlink(self.temporary)


def _create(path: str, mode: int) -> int:
    """A new file, locked; -1 if it was swept away before it had its lock."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    # Whoever finds the file can tell by the lock whether its writer lives. Some network file systems have no locks;
    # there a dead writer's file stays.
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX)
    if os.path.exists(path):
        return fd
    os.close(fd)
    return -1


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(fd, data[:PIECE], offset)
        data, offset = data[done:], offset + done


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_if_stale(path: str) -> None:
    with naming("delete", path):
        try:
            fd = os.open(path, os.O_RDWR)
        except (FileNotFoundError, PermissionError):
            return  # gone, or another user's, who sweeps it
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # its writer is at work
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        finally:
            os.close(fd)
