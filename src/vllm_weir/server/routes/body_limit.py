"""The limit on request bodies, which are refused before they are read whole."""

from __future__ import annotations

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_weir.server.errors import error

MAX_DIGITS = 18
"""Digits of the largest plausible Content-Length."""


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
