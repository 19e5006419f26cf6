"""Local files with those methods of fsspec's file systems that `ObjectStore` calls; their URLs and errors."""

from __future__ import annotations

import contextlib
import gzip
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from os import PathLike
from typing import Any

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
