"""The directory that the API-server processes of one server share."""

from __future__ import annotations

import atexit
import fcntl
import multiprocessing.util
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_weir.errors import WeirError

NAME = "weir-serve"
LOCK_NAME = ".alive"
"""The file on which each process that uses the directory holds a shared lock."""


class SharedDirectory:
    """A directory of mode 0700 that processes with the same key share.

    Each process holds a shared lock on it while it lives. A directory that nobody has locked may be
    removed by anyone, so those of killed servers go when the next server starts.

    Args:
        key: The id of a process that all of them know.
        parent: The directory in which it is created; empty for the system's temporary directory.

    Attributes:
        path: The directory.
    """

    def __init__(self, key: int, parent: str = "") -> None:
        for path in _base(parent).glob(f"{NAME}-{os.getuid()}-*"):
            _remove_if_unused(path)
        self.path = _path(key, parent)
        self._lock = _join(self.path)
        self._owner = os.getpid()
        # Processes that multiprocessing starts run its finalizers at exit, not those of atexit.
        self._finalizer = multiprocessing.util.Finalize(
            self, _leave, (self.path, self._lock, self._owner), exitpriority=1
        )
        atexit.register(self._finalizer)

    def subdirectory(self, name: str) -> Path:
        path = self.path / name
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def close(self) -> None:
        """Stop using the directory; the last process to do so removes it."""
        self._finalizer()
        atexit.unregister(self._finalizer)


def clear(key: int, parent: str = "", patience: float = 5.0) -> None:
    """Remove the directory of killed processes, waiting `patience` seconds for the last to end."""
    path, deadline = _path(key, parent), time.monotonic() + patience
    while path.exists():
        _remove_if_unused(path)
        if time.monotonic() > deadline:
            return  # another process still serves and will remove it
        time.sleep(0.05)


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold the file `path` locked against other processes and threads, and yield its descriptor.

    This is not filelock, which polls instead of waiting in the kernel and does not give the
    descriptor.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def _base(parent: str) -> Path:
    return Path(parent or tempfile.gettempdir())


def _path(key: int, parent: str) -> Path:
    return _base(parent) / f"{NAME}-{os.getuid()}-{key}"


def _join(path: Path) -> int:
    """Create the directory if need be, and return a descriptor that holds a shared lock on it."""
    for _ in range(100):
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                why = f"{path} exists and is not a directory that only this user can access; remove it"
                raise WeirError(why, "serve") from None
        try:
            fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue  # another process has just removed it
        fcntl.flock(fd, fcntl.LOCK_SH)
        try:
            if os.stat(path / LOCK_NAME).st_ino == os.fstat(fd).st_ino:
                return fd
        except FileNotFoundError:
            pass  # another process removed it before it was locked here
        os.close(fd)
    raise WeirError(f"cannot create {path}: other processes keep removing it", "serve")


def _leave(path: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child
    # Unlocking first lets one of two processes that leave at the same time find itself the last.
    fcntl.flock(lock, fcntl.LOCK_UN)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        pass  # other processes still use it
    finally:
        os.close(lock)


def _remove_if_unused(path: Path) -> None:
    try:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return
        fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return  # removed meanwhile, or another user's
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        pass  # its server is running
    finally:
        os.close(fd)
