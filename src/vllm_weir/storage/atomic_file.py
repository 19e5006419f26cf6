"""Files of a local or remote store: URLs, and writes that happen whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import gzip
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from os import PathLike
from typing import Any, Protocol

from vllm_weir.errors import MissingFile, StoreError, WeirError


@contextlib.contextmanager
def store_errors(action: str, file: str) -> Iterator[None]:
    """Raise an OSError of the block as StoreError (or MissingFile) with the name of `file`."""
    try:
        yield
    except WeirError:
        raise
    except OSError as e:
        kind = MissingFile if isinstance(e, FileNotFoundError) else StoreError
        raise kind(f"cannot {action} {file}: {e.strerror or e}") from e


class LocalFiles:
    """The local file system. Paths are absolute; errors are the operating system's."""

    protocol = "file"

    def find(self, root: str, *, deep: bool, folder_prefix: str = "") -> dict[str, int]:
        """Return the files below `root`, by relative name, and their sizes in bytes; `deep`: in its folders too.

        Hidden files and folders are left out, as are folders whose names do not begin with `folder_prefix`; links to
        folders are not followed. OSError if a folder cannot be listed, FileNotFoundError only for `root`.
        """
        sizes: dict[str, int] = {}
        self._list(root or "/", "", folder_prefix, deep, sizes)
        return sizes

    def _list(self, path: str, prefix: str, folder_prefix: str, deep: bool, sizes: dict[str, int]) -> None:
        folders = []
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                with suppress(FileNotFoundError):  # deleted meanwhile
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.name)
                    elif entry.is_file():
                        sizes[prefix + entry.name] = entry.stat().st_size
        for folder in folders if deep else ():
            if folder.startswith(folder_prefix):
                with suppress(FileNotFoundError):
                    self._list(f"{path}/{folder}", f"{prefix}{folder}/", "", True, sizes)

    def isfile(self, path: str) -> bool:
        return os.path.isfile(path)

    def exists(self, path: str) -> bool:
        return os.path.exists(path or "/")

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path or "/", exist_ok=exist_ok)

    def size(self, path: str) -> int:
        return os.path.getsize(path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        with open(path, "rb") as file:
            file.seek(start or 0)
            return file.read() if end is None else file.read(max(0, end - (start or 0)))

    def cat_ranges(self, paths: Sequence[str], starts: Sequence[int], ends: Sequence[int], **_: Any) -> list[bytes]:
        return [self.cat_file(*one) for one in zip(paths, starts, ends, strict=True)]

    def rm_file(self, path: str) -> None:
        os.remove(path)

    def open(self, path: str, mode: str = "rb", compression: str | None = None) -> Any:
        return gzip.open(path, mode) if compression == "gzip" else open(path, mode)

    def invalidate_cache(self) -> None:
        """Do nothing: no listing is kept."""


LOCAL_PROTOCOLS = ("file://", "local://")


def checked_url(url: object) -> str:
    text = os.fspath(url) if isinstance(url, (str, PathLike)) else None
    if not isinstance(text, str):
        raise WeirError(f"a path or a URL is text, got {type(url).__name__}", "url")
    if "\0" in text:
        raise WeirError("a path or a URL cannot contain a NUL", "url")
    if not text:  # it would be taken for the current directory
        raise WeirError("it is empty; the current directory is '.'", "url")
    return text


def local_path(url: str) -> str | None:
    """Return the absolute path of a local URL, or None for other and chained file systems."""
    for protocol in LOCAL_PROTOCOLS:
        if url.startswith(protocol) and "::" not in url:
            return absolute_path(url.removeprefix(protocol))
    return None if "://" in url else absolute_path(url)


def absolute_path(path: str) -> str:
    """Expand ``~`` and the current directory, and remove slashes at the end."""
    if path.startswith("~"):
        path = os.path.expanduser(path)
    if not path.startswith("/"):
        path = f"{os.getcwd()}/{'' if path == '.' else path.removeprefix('./')}"
    return path.rstrip("/")


def split_url(url: str) -> tuple[str, str]:
    """Split a file's URL into the URL of its folder and its name."""
    if "://" not in url:
        folder, _, name = url.rpartition("/")
        return folder or ("/" if url.startswith("/") else "."), name
    # Of a chain of file systems (zip://rows.npz::s3://bucket/a.zip) the path is in the first link
    # that has one.
    links = url.split("::")
    link_index = next(i for i, link in enumerate(links) if "://" in link)
    protocol, _, path = links[link_index].partition("://")
    folder, _, name = path.rpartition("/")
    links[link_index] = f"{protocol}://{folder or ('/' if path.startswith('/') else '')}"
    return "::".join(links), name


UPLOAD_NAME = "weir-upload"
"""Base of a temporary file's name in the folder of temporary files, for a file that will be sent to
a remote store."""

_TEMPORARY_NAME = re.compile(r"\..+\.[0-9a-f]{8}\.tmp", re.DOTALL)
"""Name of the temporary file of an `AtomicFile` in a local store."""

_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)

WRITE_BYTES = 1 << 20
"""Bytes of one write call: for larger ones ext4 looks for long runs of free memory, which can be
slow."""


class PublishingStore(Protocol):
    """The part of `ObjectStore` that an `AtomicFile` uses."""

    local: bool
    fsync: bool

    def path(self, name: str) -> str: ...

    def describe(self, name: str) -> str: ...

    def store_errors(self, action: str, name: str) -> AbstractContextManager[None]: ...

    def upload(self, path: str, name: str) -> None: ...


class AtomicFile:
    """A file that is not visible under its name until `publish`. Made by `ObjectStore.new_file`.

    In a local store it is a hidden file in the same folder, which `publish` renames. For a remote
    store it is a local temporary file, which `publish` uploads. While the writer lives it holds a
    lock on the temporary file, so that other processes can tell what a dead writer left behind.

    Attributes:
        store, name: Where it will be published.
        file: The file as messages name it.
        temporary: Path of the temporary file.
        size: Bytes written.
    """

    def __init__(self, store: PublishingStore, name: str) -> None:
        self.store, self.name, self.size = store, name, 0
        self._reserved = 0
        self.file = store.describe(name)
        with store_errors("write", self.file):
            folder, base, mode = tempfile.gettempdir(), UPLOAD_NAME, 0o600
            if store.local:
                folder, base = os.path.split(store.path(name))
                os.makedirs(folder, exist_ok=True)
                mode = 0o644
            self._fd = -1
            while self._fd < 0:
                self.temporary = os.path.join(folder, f".{base}.{secrets.token_hex(4)}.tmp")
                self._fd = _create_locked(self.temporary, mode)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`; an error leaves the file as it was."""
        with store_errors("write", self.file):
            try:
                _write_all(self._fd, memoryview(data).cast("B"), self.size)
            except OSError:
                self._truncate_to_size()
                raise
        written = memoryview(data).nbytes
        if self.store.local and self.store.fsync and hasattr(os, "posix_fadvise"):
            # The kernel starts to write it to the disk, so that `publish` waits for less.
            os.posix_fadvise(self._fd, self.size, written, os.POSIX_FADV_DONTNEED)
        self.size += written

    def reserve(self, size: int) -> bool:
        """Reserve disk space so that the file can grow to `size` bytes; raise StoreError if the disk is full.

        Not to be called while another thread writes: the C library may reserve by writing zeros. False if the file
        system cannot reserve, so that only writing shows whether there is room.
        """
        if size <= max(self.size, self._reserved):
            return True
        if not hasattr(os, "posix_fallocate"):
            return False
        with store_errors("write", self.file):
            try:
                # Rounded up, so that calls are few.
                self._reserve(-(-size // WRITE_BYTES) * WRITE_BYTES)
            except OSError as e:
                if e.errno in _CANNOT_RESERVE:
                    return False
                self._reserve(size)
        return True

    def _reserve(self, size: int) -> None:
        start = max(self.size, self._reserved)
        try:
            os.posix_fallocate(self._fd, start, size - start)
        except OSError:
            os.ftruncate(self._fd, start)
            raise
        self._reserved = size

    def write_at(self, offset: int, data: bytes) -> None:
        with store_errors("write", self.file):
            _write_all(self._fd, memoryview(data), offset)

    def truncate(self, size: int) -> None:
        with store_errors("write", self.file):
            os.ftruncate(self._fd, size)
        self.size, self._reserved = size, 0

    def publish(self) -> None:
        """Make the whole file visible under its name; after an error it can be tried again."""
        with self.store.store_errors("write", self.name):
            if self._reserved > self.size:
                self._truncate_to_size()
            if self.store.local:
                self._rename()
                os.close(self._fd)
            else:
                self.store.upload(self.temporary, self.name)
                self._let_go()

    def _rename(self) -> None:
        path = self.store.path(self.name)
        if self.store.fsync:
            os.fsync(self._fd)
        os.replace(self.temporary, path)
        if self.store.fsync:
            try:
                _sync_folder(os.path.dirname(path))
            except OSError:
                os.replace(path, self.temporary)
                raise

    def _truncate_to_size(self) -> None:
        os.ftruncate(self._fd, self.size)
        self._reserved = 0

    def discard(self) -> None:
        with store_errors("delete", self.temporary):
            self._let_go()

    def _let_go(self) -> None:
        """Delete the temporary file, and then the lock: what is not locked others take for left behind."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.temporary)
        os.close(self._fd)


def remove_stale_uploads() -> None:
    for path in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), f".{UPLOAD_NAME}.*.tmp")):
        _remove_if_stale(path)


def remove_stale_files(root: str, folder_prefix: str | None) -> None:
    """Delete temporary files in the folder `root` whose writers have died.

    With a `folder_prefix` also at any depth in those of its folders whose names begin so.
    """
    for folder, subfolders, files in os.walk(root):
        if folder == root:
            subfolders[:] = [
                name for name in subfolders if folder_prefix is not None and name.startswith(folder_prefix)
            ]
        for file in files:
            if _TEMPORARY_NAME.fullmatch(file):
                _remove_if_stale(os.path.join(folder, file))


def _create_locked(path: str, mode: int) -> int:
    """Create and lock a file; return its descriptor, or -1 if it was removed before the lock."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    # The lock tells whoever finds the file that its writer lives. Some network file systems have no
    # locks; there a dead writer's file stays.
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX)
    if os.path.exists(path):
        return fd
    os.close(fd)
    return -1


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data[:WRITE_BYTES], offset)
        data, offset = data[written:], offset + written


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_if_stale(path: str) -> None:
    with store_errors("delete", path):
        try:
            fd = os.open(path, os.O_RDWR)
        except (FileNotFoundError, PermissionError):
            return  # already gone, or another user's, who removes it
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # its writer is alive
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        finally:
            os.close(fd)
