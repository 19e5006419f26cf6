"""Errors of Weir's routes, in the form of vLLM's errors."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from vllm_weir.errors import WeirError


class ErrorInfo(BaseModel):
    """What went wrong; `param` names the wrong field."""

    message: str
    type: str
    param: str | None = None
    code: int


class ErrorBody(BaseModel):
    """OpenAI's error body."""

    error: ErrorInfo


TYPES = {
    400: "BadRequestError",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFoundError",
    413: "RequestTooLarge",
    416: "RangeNotSatisfiable",
    500: "InternalServerError",
    507: "InsufficientStorage",
}


class InternalFault(WeirError):
    """A failure of the server, not a mistake of the client."""

    status = 500


class StateNotSaved(InternalFault):
    """The server's disk refused what it was to store; nothing was changed."""

    status = 507


class PeerUnanswered(InternalFault):
    """Another of the server's processes, which may know the answer, did not give it."""


def error(code: int, message: str, param: str | None = None) -> JSONResponse:
    return JSONResponse(error_body(code, message, param), code)


def error_body(code: int, message: str, param: str | None = None) -> dict[str, Any]:
    return ErrorBody(error=ErrorInfo(message=message, type=TYPES[code], param=param, code=code)).model_dump()


def declared(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"model": ErrorBody} for code in codes}


def weir_error(_request: Request, e: Exception) -> JSONResponse:
    """Handle a WeirError: status 400, or an `InternalFault`'s own."""
    assert isinstance(e, WeirError)
    return error(e.status if isinstance(e, InternalFault) else 400, str(e), e.field or None)
