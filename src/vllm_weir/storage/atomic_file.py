"""`AtomicFile`: a file that is written piece by piece and published in one step."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import re
import secrets
import tempfile
from contextlib import AbstractContextManager
from typing import Protocol

from vllm_weir.storage.local_files import store_errors

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
