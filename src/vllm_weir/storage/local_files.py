"""Local files with the methods of fsspec's file systems that an `ObjectStore` calls, with Python's own library
alone."""

from __future__ import annotations

import gzip
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

PROTOCOLS = ("file://", "local://")


def local_path(url: str) -> str | None:
    """The absolute path that a URL stands for; None for one of another file system, or a chain of several."""
    for protocol in PROTOCOLS:
        if url.startswith(protocol) and "::" not in url:
            return absolute(url.removeprefix(protocol))
    return None if "://" in url else absolute(url)


def absolute(path: str) -> str:
    """A path from the root, ``~`` and the current directory filled in, without a slash at its end."""
    if path.startswith("~"):
        path = os.path.expanduser(path)
    if not path.startswith("/"):
        path = f"{os.getcwd()}/{'' if path == '.' else path.removeprefix('./')}"
    return path.rstrip("/")


class LocalFiles:
    """The local file system. Paths are absolute; errors are the operating system's."""

    protocol = "file"

    def find(self, root: str, *, deep: bool, folders: str = "") -> dict[str, int]:
        """Files below `root`, by name from there, and their bytes.

        Hidden files and folders are left out, and links to folders are not followed.

        Args:
            deep: also what is in folders; else what lies in `root` itself.
            folders: of the folders in `root` only those whose names begin so.

        Raises:
            OSError: if a folder cannot be listed; FileNotFoundError only for `root`.
        """
        found: dict[str, int] = {}
        self._list(root or "/", "", folders, deep, found)
        return found

    def _list(self, path: str, name: str, folders: str, deep: bool, found: dict[str, int]) -> None:
        below = []
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                with suppress(FileNotFoundError):  # it is gone since
                    if entry.is_dir(follow_symlinks=False):
                        below.append(entry.name)
                    elif entry.is_file():
                        found[name + entry.name] = entry.stat().st_size
        for folder in below if deep else ():
            if folder.startswith(folders):
                with suppress(FileNotFoundError):
                    self._list(f"{path}/{folder}", f"{name}{folder}/", "", True, found)

    def isfile(self, path: str) -> bool:
        return os.path.isfile(path)

    def exists(self, path: str) -> bool:
        return os.path.exists(path or "/")

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path or "/", exist_ok=exist_ok)

    def size(self, path: str) -> int:
        return os.path.getsize(path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """The bytes from `start` up to `end`."""
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
        """Nothing: no listing is kept."""
