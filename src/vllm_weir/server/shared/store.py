"""Files of a store that several servers share: a folder, or a bucket of S3, by its fsspec URL."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.util.atomic_write import atomic_write

FIELD = "--weir-store"
_PACKAGES = {"file": "fsspec", "s3": "s3fs"}
"""Kinds of stores that create a file only if there is none, on which every change rests -> the package for one."""
_CONFLICT = "ConditionalRequestConflict"
"""S3's answer where another upload of the same file is under way."""


def check_url(url: str) -> str:
    """Return the URL of a store, a folder's made absolute.

    Raises:
        WeirError: if a store cannot be there, or the package for it is missing.
    """
    kind, separator, rest = url.partition("://")
    if not separator:
        kind, rest, url = "file", url, f"file://{os.path.abspath(url)}"
    if not rest or kind not in _PACKAGES:
        raise WeirError(f"expected a folder or s3://BUCKET/FOLDER, got {url[:200]!r}", FIELD)
    if find_spec(_PACKAGES[kind]) is None:
        extra = "keep" if kind == "file" else kind
        raise WeirError(f"{kind}:// needs {_PACKAGES[kind]}: pip install 'vllm-weir[{extra}]'", FIELD)
    return url


class Store:
    """Files by name below a URL; ``/`` in a name separates folders. Nothing is cached.

    Failures are OSErrors, FileNotFoundError where there is no such file.

    Args:
        url: as `check_url` returns it.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.url = url
        self._fs: Any
        self._fs, self._root = url_to_fs(url, use_listings_cache=False)
        self.folder = Path(self._root) if url.startswith("file://") else None
        """The store itself, if it is a folder."""

    def read(self, name: str) -> bytes:
        with _os_errors():
            return self._fs.cat_file(self._path(name))

    def create(self, name: str, data: bytes) -> bool:
        """Write a whole file unless there is one of the name, and return whether there was none."""
        if self.folder is None:
            try:
                with _os_errors():
                    self._fs.pipe_file(self._path(name), data, mode="create")
            except FileExistsError:
                # What was sent again after an answer that got lost has met itself.
                return self.read(name) == data
            except OSError as e:
                if _CONFLICT in f"{e}{e.__cause__}":
                    return False
                raise
            return True
        path = self._made(name)
        temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            temporary.write_bytes(data)
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def upload(self, source: Path, name: str) -> None:
        """Write a whole file, in place of any of the name."""
        if self.folder is None:
            with _os_errors():
                self._fs.put_file(str(source), self._path(name))
            return
        with open(source, "rb") as file, atomic_write(self._made(name), 0o600) as copy:
            shutil.copyfileobj(file, copy)

    def download(self, name: str, target: Path) -> None:
        """Copy a file to a path, where it appears whole."""
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            with _os_errors():
                self._fs.get_file(self._path(name), f"{folder}/file")
            os.replace(f"{folder}/file", target)

    def modified(self, name: str) -> float:
        """Return the time of a file, in seconds, by the store's clock."""
        with _os_errors():
            return self._fs.modified(self._path(name)).timestamp()

    def files(self, folder: str) -> dict[str, tuple[float, int]]:
        """Return name -> (time, bytes) of all files below a folder; no name begins with a dot."""
        with _os_errors():
            try:
                found = self._fs.find(self._path(folder), detail=True)
            except FileNotFoundError:
                return {}
        # s3fs lists the folder itself where its first file is made while it looks.
        files = {path: info for path, info in found.items() if info["type"] != "directory"}
        names = {path[len(self._root) + 1 :]: info for path, info in files.items()}
        return {name: (_time_of(info), info["size"]) for name, info in names.items() if "/." not in name}

    def remove(self, name: str) -> bool:
        """Remove a file; return whether there was one."""
        try:
            self.modified(name)  # S3 removes what is not there, too
            with _os_errors():
                self._fs.rm_file(self._path(name))
        except FileNotFoundError:
            return False
        return True

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _made(self, name: str) -> Path:
        path = Path(self._path(name))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path


def _time_of(info: dict[str, Any]) -> float:
    time = info["LastModified"] if "LastModified" in info else info["mtime"]
    return time.timestamp() if isinstance(time, datetime) else float(time)


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raise what a store's package raises as OSErrors, as most of them are already."""
    try:
        yield
    except OSError:
        raise
    except Exception as e:
        raise OSError(f"{type(e).__name__}: {str(e)[:200]}") from e
