"""Errors of the operating system as Weir's, with the file's name in the message."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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
