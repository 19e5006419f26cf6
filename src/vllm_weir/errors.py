"""The errors that users of Weir meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def brief(value: object, limit: int = 40) -> str:
    """Return the first `limit` characters of a value for an error message, also of one that has no text.

    Huge integers and deeply nested lists raise when they are made a string.
    """
    try:
        return str(value)[:limit]
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to show"


def _printable(text: str) -> str:
    """Return the text with lone surrogates, which JSON may contain and UTF-8 cannot, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


class WeirError(ValueError):
    """A request, setting or result that Weir refuses or cannot deliver.

    Raised before a request enters the engine wherever that is possible (HTTP 400 over the server).

    Attributes:
        field: dotted path of what is wrong, e.g. ``capture[0].layers``; empty when no single field is to blame.
        outputs: where ``LLM.generate`` raises because one request of a batch failed: the outputs of the whole batch,
            complete for the other requests. Otherwise None.
    """

    outputs: Sequence[Any] | None = None

    def __init__(self, message: str, field: str = "") -> None:
        self.field = field = _printable(field)
        self.message = message = _printable(message)
        super().__init__(f"{field}: {message}" if field else message)

    def __reduce__(self) -> tuple[type[WeirError], tuple[object, ...]]:
        return type(self), (self.message, self.field)


class StoreError(WeirError):
    """A file or folder could not be listed, read or written: no permission, a broken disk, no connection.

    Says nothing about its contents.
    """


class MissingFile(StoreError, FileNotFoundError):
    """A file does not exist."""
