"""What Weir's routes share: their router, the check of the admin key, and the limit on request bodies."""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Path, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException as StarletteException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_weir.server.errors import error
from vllm_weir.server.state import ServerState, server_state

HEADER = "X-Weir-Admin-Key"
_CHALLENGE = {"WWW-Authenticate": "Bearer"}
MAX_DIGITS = 18
"""Digits of the largest plausible Content-Length."""

Name = Annotated[str, Path(description="1 to 128 letters, digits and . _ : @ + -", examples=["mood"])]
State = Annotated[ServerState, Depends(server_state)]


class WeirRoute(APIRoute):
    """A route that checks the admin key before the body, and reports an unreadable body like vLLM.

    FastAPI parses a body before it calls dependencies. For bytes that are not text it raises
    Starlette's error, which vLLM does not convert.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler with these two differences."""
        handle = super().get_route_handler()
        needs_admin = any(one.dependency is require_admin for one in self.dependencies)

        async def handler(request: Request) -> Response:
            if needs_admin:
                require_admin(request)
            try:
                return await handle(request)
            except StarletteException as e:
                if e.status_code != 400 or isinstance(e, HTTPException):
                    raise
                return error(400, f"the body cannot be read as JSON: {e.detail}", "body")
            except RequestValidationError as e:
                first = e.errors()[0]
                if first["type"] != "json_invalid":
                    raise
                return error(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}", "body")

        return handler


def unknown(message: str) -> Response:
    """Return the answer to a request that names something which is not here."""
    return error(404, message, "name")


def deleted(found: bool, message: str) -> Response:
    """Return the answer to a DELETE: 204, or 404 with the message if nothing was found."""
    return Response(status_code=204) if found else unknown(message)


def weir_router() -> APIRouter:
    return APIRouter(tags=["weir"], route_class=WeirRoute)


def require_admin(request: Request) -> None:
    """Refuse a request without the admin key (a FastAPI dependency).

    Raises:
        HTTPException: 403 if the server has no admin key, 401 if the request has none or a wrong one.
    """
    admin_key = server_state(request).admin_key
    if not admin_key:
        raise HTTPException(403, "this server has no admin key; start it with WEIR_ADMIN_KEY or --weir-admin-key-file")
    candidates = [request.headers[HEADER]] if HEADER in request.headers else []
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        candidates.append(token.strip(" \t"))
    if not candidates:
        raise HTTPException(401, f"this route needs the admin key in the header {HEADER}", _CHALLENGE)
    # Headers are bytes that Starlette decodes as Latin-1; the key is from the environment.
    if not any(hmac.compare_digest(key.encode("latin-1"), os.fsencode(admin_key)) for key in candidates):
        why = "the admin key is wrong"
        if HEADER not in request.headers:
            why = f"the admin key is missing: there is no header {HEADER}, and Authorization has another key"
        raise HTTPException(401, why, _CHALLENGE)


class BodyLimit:
    """ASGI middleware that answers 413 to a body of more than `max_bytes`, declared or not."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared, chunked = b"", False
        for name, value in scope["headers"]:
            if name == b"content-length":
                declared = value
            elif name == b"transfer-encoding":
                chunked = True
        if declared.isdigit():
            if len(declared) > MAX_DIGITS or int(declared) > self._max_bytes:
                await error(413, self._message())(scope, receive, send)
                return
            if not chunked:  # the server reads no more than was declared
                await self._app(scope, receive, send)
                return
        read = 0

        async def receive_counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b"")) if message["type"] == "http.request" else 0
            if read > self._max_bytes:
                raise HTTPException(413, self._message())
            return message

        await self._app(scope, receive_counted, send)

    def _message(self) -> str:
        return f"the body is larger than {self._max_bytes} bytes (WEIR_SERVE_BODY_BYTES)"
