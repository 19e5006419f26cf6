"""Errors of the clients: `WeirError` for a wrong request, its subclasses for other failures."""

from __future__ import annotations

import json
from typing import Any

from vllm_weir.errors import WeirError, brief


class ServiceError(WeirError):
    """The base class of all failures other than a wrong request.

    Attributes:
        status: The HTTP status, or None if there was no response.
    """

    def __init__(self, message: str, field: str = "", status: int | None = None) -> None:
        super().__init__(message, field)
        self.status = status

    def __reduce__(self) -> tuple[type[WeirError], tuple[object, ...]]:
        return type(self), (self.message, self.field, self.status)


class AuthError(ServiceError):
    """A key is missing or wrong (401), or the server has no admin key (403)."""


class NotFound(ServiceError):
    """The server does not have what was asked for, or has removed it (404)."""


class TooLarge(ServiceError):
    """The request is larger than the server accepts (413)."""


class ServerError(ServiceError):
    """The server failed (5xx), was busy (429) or out of reach, or the connection broke."""


_BY_STATUS: dict[int, type[ServiceError]] = {401: AuthError, 403: AuthError, 404: NotFound, 413: TooLarge}


def error_from(status: int, body: bytes | str | dict[str, Any]) -> WeirError:
    """Return the error for a response; its `field` is the ``param`` of an OpenAI error body."""
    message, field = _message_and_field(body)
    message = message or f"HTTP status {status}"
    kind = _BY_STATUS.get(status)
    if kind is None and (status >= 500 or status == 429):
        kind = ServerError
    return WeirError(message, field) if kind is None else kind(message, field, status)


def _message_and_field(body: bytes | str | dict[str, Any]) -> tuple[str, str]:
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
