"""Paths and fsspec URLs: checking them, splitting them, and telling local ones from others."""

from __future__ import annotations

import os
from os import PathLike

from vllm_weir.errors import WeirError

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
