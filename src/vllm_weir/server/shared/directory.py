"""The directory that the API-server processes of one server share. It lives as long as any of them."""

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
ALIVE = ".alive"


class SharedDirectory:
    """A directory of mode 0700, keyed by a process that all who share it can name.

    Each holds a shared lock on it while it lives: whoever finds that nobody does may remove it, so directories of
    servers that were killed go when the next server starts.

    Args:
        key: id of the process; processes that give the same one share the directory.
        parent: where it is made; empty: the system's temporary directory.
    """

    def __init__(self, key: int, parent: str = "") -> None:
        for any_server in _base(parent).glob(f"{NAME}-{os.getuid()}-*"):
            _remove_if_dead(any_server)
        self.path = _place(key, parent)
        self._lock = _join(self.path)
        self._owner = os.getpid()
        # Children that multiprocessing starts run no atexit functions, only its own.
        self._finalizer = multiprocessing.util.Finalize(
            self, _leave, (self.path, self._lock, self._owner), exitpriority=1
        )
        atexit.register(self._finalizer)

    def room(self, name: str) -> Path:
        """A directory in it, made if it is not there."""
        path = self.path / name
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def close(self) -> None:
        """Let go of it; the last process that does removes it."""
        self._finalizer()
        atexit.unregister(self._finalizer)


def clear(key: int, parent: str = "", patience: float = 5.0) -> None:
    """Remove the directory of processes that were killed; `patience` is how many seconds the last may take to go."""
    path, deadline = _place(key, parent), time.monotonic() + patience
    while path.exists():
        _remove_if_dead(path)
        if time.monotonic() > deadline:
            return  # somebody still serves; who goes last removes it
        time.sleep(0.05)


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold the file `path` locked, against other processes and other threads of this one; gives its descriptor."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def _base(parent: str) -> Path:
    return Path(parent or tempfile.gettempdir())


def _place(key: int, parent: str) -> Path:
    return _base(parent) / f"{NAME}-{os.getuid()}-{key}"


def _join(path: Path) -> int:
    for _ in range(100):
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise WeirError(f"{path} is there and is not this user's alone; remove it", "serve") from None
        try:
            fd = os.open(path / ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue  # another process has just removed it
        fcntl.flock(fd, fcntl.LOCK_SH)
        try:
            if os.stat(path / ALIVE).st_ino == os.fstat(fd).st_ino:
                return fd
        except FileNotFoundError:
            pass  # removed before it was locked
        os.close(fd)
    raise WeirError(f"cannot make {path}: it is removed again and again", "serve")


def _leave(path: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child
    fcntl.flock(lock, fcntl.LOCK_UN)  # of two who leave at once one then finds itself alone
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        pass  # others still use it
    finally:
        os.close(lock)


def _remove_if_dead(path: Path) -> None:
    try:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return
        fd = os.open(path / ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return  # gone meanwhile, or not ours
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        pass  # its server lives
    finally:
        os.close(fd)
