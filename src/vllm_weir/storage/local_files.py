"""Local files with those methods of fsspec's file systems that `ObjectStore` calls."""

from __future__ import annotations

import gzip
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any


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
