"""Captured rows by reference."""

from __future__ import annotations

import re
from typing import Annotated, BinaryIO

from fastapi import APIRouter, Depends, Path
from fastapi.responses import FileResponse, Response
from starlette.types import Message, Receive, Scope, Send

from vllm_weir.server.errors import declared, error
from vllm_weir.server.routes.router import weir_router
from vllm_weir.server.state import ServerState, server_state

MEDIA = "application/octet-stream"
_PART = re.compile(r"\s*(\d{0,18})-(\d{0,18})\s*", re.ASCII)
Id = Annotated[str, Path(description="The id that the choice's `weir.activations.id` says.")]
State = Annotated[ServerState, Depends(server_state)]


class OpenResultFile(FileResponse):
    """An open file, also one that is deleted while it is read."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        super().__init__(f"/proc/self/fd/{file.fileno()}", media_type=MEDIA, filename=name)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A range that is none, or of other units, is to be ignored (RFC 9110, 14.2); Starlette answers in plain text.
        headers = [(k, v) for k, v in scope["headers"] if k != b"range" or _is_range(v.decode("latin-1"))]
        outside: Message | None = None

        async def noted(message: Message) -> None:
            nonlocal outside
            if message["type"] == "http.response.start" and message["status"] == 416:
                outside = message
            if outside is None:
                await send(message)

        with self._file:
            await super().__call__({**scope, "headers": headers}, receive, noted)
        if outside is not None:
            size = dict(outside["headers"]).get(b"content-range", b"").decode("latin-1").rpartition("/")[2]
            answer = error(416, f"no byte of the file is in the range; it has {size}", "Range")
            answer.headers["Content-Range"] = f"bytes */{size}"
            await answer(scope, receive, send)


def router() -> APIRouter:
    """GET and DELETE /v1/activations/{id}."""
    routes = weir_router()

    @routes.get(
        "/v1/activations/{id}",
        response_class=FileResponse,
        responses={
            200: {"content": {MEDIA: {}}},
            206: {"content": {MEDIA: {}}},
            **declared(400, 401, 404, 416),
        },
        summary="Rows of one choice, as a safetensors file; Range is honoured",
    )
    def fetch(id: Id, state: State) -> Response:
        file = state.spool.open(id) if state.spool is not None else None
        return _unknown(id) if file is None else OpenResultFile(file, f"{id}.safetensors")

    @routes.delete(
        "/v1/activations/{id}",
        status_code=204,
        response_class=Response,
        responses=declared(401, 404),
        summary="Free rows before they expire",
    )
    def free(id: Id, state: State) -> Response:
        if state.spool is None or not state.spool.delete(id):
            return _unknown(id)
        return Response(status_code=204)

    return routes


def _is_range(value: str) -> bool:
    unit, _, parts = value.partition("=")
    found = [_PART.fullmatch(part) for part in parts.split(",")]
    return unit.strip() == "bytes" and all(
        part is not None and any(part.groups()) and not (all(part.groups()) and int(part[1]) > int(part[2]))
        for part in found
    )


def _unknown(id: str) -> Response:
    return error(404, f"no activations are kept under {id[:40]!r}; they may have expired", "id")
