"""The error that a user of Weir meets, and its kinds for files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def brief(value: object, limit: int = 40) -> str:
    """The start of what a caller sent, for an error message; huge numbers and deep nesting have no text."""
    try:
        return str(value)[:limit]
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to show"


def _printable(text: str) -> str:
    """As UTF-8 can hold it: half of a surrogate pair, which JSON may bring, is shown as JSON writes it."""
    return text.encode("utf-8", "backslashreplace").decode()


class WeirError(ValueError):
    """A request, setting or result that Weir refuses or cannot deliver.

    Raised before a request enters the engine wherever that is possible (HTTP 400 over the server).

    Attributes:
        field: dotted path of what is wrong, e.g. ``capture[0].layers``; empty when no single field is to blame.
        outputs: all of the batch, the other requests' whole, where ``LLM.generate`` raises because one of them failed
            once the batch was done; else None.
    """

    outputs: Sequence[Any] | None = None

    def __init__(self, message: str, field: str = "") -> None:
        self.field = field = _printable(field)
        self.message = message = _printable(message)
        super().__init__(f"{field}: {message}" if field else message)

    def __reduce__(self) -> tuple[type[WeirError], tuple[object, ...]]:
        return type(self), (self.message, self.field)


class StoreError(WeirError):
    """A file or folder that could not be listed, read or written: no permission, a broken disk, no connection. Of what
    is in it nothing is known."""


class MissingFile(StoreError, FileNotFoundError):
    """A file that is not there."""
