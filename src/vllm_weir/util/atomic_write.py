"""Write a file under a temporary name and rename it, so that readers see the old content or the new one, whole."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: str | os.PathLike, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a hidden temporary file beside `path`, and rename it to `path` when the block ends without an error.

    A process that has the older file open or mapped keeps it. After an error `path` is untouched, and the temporary
    file is gone. Nothing waits for the disk: `vllm_weir.storage.atomic_file.AtomicFile` does that where it is asked
    for, reserves room, and can be told from the file of a process that has died.

    Args:
        path: The file to write; its folder exists.
        mode: Permissions of a new file, less those that the umask takes away.

    Yields:
        The temporary file, open for writing and reading. Its name ends in ``.tmp``.

    Raises:
        OSError: If the file cannot be written or renamed.
        ValueError: If `path` contains a NUL.
    """
    path = Path(path)
    temporary = path.parent / f".weir-{secrets.token_hex(8)}.tmp"
    try:
        with open(temporary, "x+b", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError, ValueError):  # it could not be created
            temporary.unlink()
        raise
