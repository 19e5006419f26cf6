"""`WeirError`, the error that Weir raises, and its subclasses for files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def brief(value: object, limit: int = 40) -> str:
    """Return the start of a value's text for an error message, whatever the value is.

    Huge ints and deeply nested lists have no text; they are named by their type.
    """
    try:
        return str(value)[:limit]
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to show"


def _printable(text: str) -> str:
    """Escape what UTF-8 cannot encode, such as half of a surrogate pair from JSON."""
    return text.encode("utf-8", "backslashreplace").decode()


class WeirError(ValueError):
    """A request, setting or result that Weir refuses or cannot deliver.

    Raised before a request enters the engine wherever that is possible (HTTP 400 over the server).

    Attributes:
        field: dotted path of what is wrong, e.g. ``capture[0].layers``; empty when no single field
            is to blame.
        message: what is wrong, without the field.
        outputs: the outputs of the whole batch, if ``LLM.generate`` raises this because a request
            failed after the batch was done; those of the other requests are complete. Else None.
    """

    outputs: Sequence[Any] | None = None

    def __init__(self, message: str, field: str = "") -> None:
        self.field = field = _printable(field)
        self.message = message = _printable(message)
        super().__init__(f"{field}: {message}" if field else message)

    def __reduce__(self) -> tuple[type[WeirError], tuple[object, ...]]:
        return type(self), (self.message, self.field)


class StoreError(WeirError):
    """A file or folder could not be listed, read or written.

    Permissions, the disk or the connection are at fault; the content may be sound.
    """


class MissingFile(StoreError, FileNotFoundError):
    """A file does not exist."""
