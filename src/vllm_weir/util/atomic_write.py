"""Writing a file under a temporary name and renaming it, so that readers never see a part of it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: str | os.PathLike, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`, and rename it to `path` if the block succeeds.

    A process that has the old file open or mapped keeps it. After an error `path` is untouched, and the temporary file,
    whose name ends in ``.tmp``, is deleted. For datasets there is `vllm_weir.storage.atomic_file.AtomicFile`, which
    also syncs and reserves disk space, uploads, and finds the files of dead writers. A new file has the permissions
    `mode`, less the umask's. Raises OSError if the file cannot be written or renamed; ValueError if `path` contains a
    NUL.
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
