"""Bodies above the limit are refused before they are read whole."""

from __future__ import annotations

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_weir.server.errors import error

LONGEST = 18
"""Digits of a length that can be meant."""


class BodyLimit:
    """ASGI middleware: 413 for a body of more than `most` bytes, declared or not."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared, counts = b"", False
        for name, value in scope["headers"]:
            if name == b"content-length":
                declared = value
            elif name == b"transfer-encoding":
                counts = True
        if declared.isdigit():
            if len(declared) > LONGEST or int(declared) > self._most:
                await error(413, self._message())(scope, receive, send)
                return
            if not counts:  # the server reads no more than was declared
                await self._app(scope, receive, send)
                return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b"")) if message["type"] == "http.request" else 0
            if read > self._most:
                raise HTTPException(413, self._message())
            return message

        await self._app(scope, counted, send)

    def _message(self) -> str:
        return f"the body is larger than {self._most} bytes (WEIR_SERVE_BODY_BYTES)"
