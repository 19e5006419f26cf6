"""What a client raises: `WeirError` for what was asked wrongly, and these for the rest."""

from __future__ import annotations

import json
from typing import Any

from vllm_weir.errors import WeirError, brief


class ServiceError(WeirError):
    """What all of these have in common.

    Attributes:
        status: the HTTP status, or None if there was no answer.
    """

    def __init__(self, message: str, field: str = "", status: int | None = None) -> None:
        super().__init__(message, field)
        self.status = status

    def __reduce__(self) -> tuple[type[WeirError], tuple[object, ...]]:
        return type(self), (self.message, self.field, self.status)


class AuthError(ServiceError):
    """The server wants a key (401), or another one (403)."""


class NotFound(ServiceError):
    """There is no such thing on the server, or no longer (404)."""


class TooLarge(ServiceError):
    """The request is larger than the server takes (413)."""


class ServerError(ServiceError):
    """The server failed (5xx), was too busy (429), or could not be reached, or the connection broke."""


_BY_STATUS: dict[int, type[ServiceError]] = {401: AuthError, 403: AuthError, 404: NotFound, 413: TooLarge}


def error_of(status: int, body: bytes | str | dict[str, Any]) -> WeirError:
    """The error that an answer means; its `field` is the ``param`` of an OpenAI error body."""
    message, field = _said(body)
    message = message or f"HTTP status {status}"
    kind = _BY_STATUS.get(status)
    if kind is None and (status >= 500 or status == 429):
        kind = ServerError
    return WeirError(message, field) if kind is None else kind(message, field, status)


def _said(body: bytes | str | dict[str, Any]) -> tuple[str, str]:
    """(message, field)."""
    data: Any = body
    if isinstance(data, bytes):
        data = data.decode("utf-8", "replace")
    if isinstance(data, str):
        try:
            data = json.loads(data)
        except (ValueError, RecursionError):
            return brief(data, 500), ""
    error = data.get("error", data) if isinstance(data, dict) else data
    if isinstance(error, str):
        return error, ""
    if not isinstance(error, dict):
        return brief(data, 500), ""
    message = error.get("message") or error.get("detail") or brief(data, 500)
    field = error.get("param") or ""
    message, field = str(message), str(field)
    return message.removeprefix(f"{field}: ") if field else message, field
