"""The routes for captured rows by reference."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, BinaryIO

from fastapi import APIRouter, Path
from fastapi.responses import FileResponse, Response
from starlette.types import Message, Receive, Scope, Send

from vllm_weir.server.errors import declared, error
from vllm_weir.server.routes.router import State, weir_router
from vllm_weir.server.shared.result_files import file_name, frame_facts, is_frame

MEDIA = "application/octet-stream"
_PART = re.compile(r"\s*(\d{0,18})-(\d{0,18})\s*", re.ASCII)
Id = Annotated[str, Path(description="The choice's `weir.activations.id`, or a `handle` of the field `activations`.")]


class OpenResultFile(FileResponse):
    """A response with an open file, which may be deleted while it is sent."""

    def __init__(self, file: BinaryIO, name: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"/proc/self/fd/{file.fileno()}", headers=headers, media_type=MEDIA, filename=name)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A malformed range, or one in other units, must be ignored (RFC 9110, 14.2).
        headers = [(k, v) for k, v in scope["headers"] if k != b"range" or _is_range(v.decode("latin-1"))]
        not_satisfiable: Message | None = None

        async def send_unless_416(message: Message) -> None:
            nonlocal not_satisfiable
            if message["type"] == "http.response.start" and message["status"] == 416:
                not_satisfiable = message
            if not_satisfiable is None:
                await send(message)

        with self._file:
            await super().__call__({**scope, "headers": headers}, receive, send_unless_416)
        if not_satisfiable is not None:  # Starlette's own answer is plain text
            size = dict(not_satisfiable["headers"]).get(b"content-range", b"").decode("latin-1").rpartition("/")[2]
            response = error(416, f"the range is outside the file, which has {size} bytes", "Range")
            response.headers["Content-Range"] = f"bytes */{size}"
            await response(scope, receive, send)


def router() -> APIRouter:
    """Return the routes GET and DELETE /v1/activations/{id}."""
    routes = weir_router()

    @routes.get(
        "/v1/activations/{id}",
        response_class=FileResponse,
        responses={
            200: {"content": {MEDIA: {}}},
            206: {"content": {MEDIA: {}}},
            **declared(400, 401, 404, 416),
        },
        summary="Rows of one choice, as a safetensors file, or one tensor as a zstd frame; Range is honoured",
    )
    def fetch(id: Id, state: State) -> Response:
        file = state.spool.open(id) if state.spool is not None else None
        if file is None:
            return _unknown(id)
        return OpenResultFile(file, file_name(id), _frame_headers(id) if is_frame(id) else None)

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


def _frame_headers(id: str) -> dict[str, str]:
    """Return what vllm-lens's server says of a frame."""
    dtype, shape = frame_facts(id)
    return {
        "Cache-Control": "no-store, private",
        "X-Content-Type-Options": "nosniff",
        "X-VLLM-Lens-Dtype": "int16" if dtype == "bfloat16" else dtype,
        "X-VLLM-Lens-Original-Dtype": f"torch.{dtype}",
        "X-VLLM-Lens-Shape": json.dumps(shape),
        "X-VLLM-Lens-Compression": "zstd",
    }


def _is_range(value: str) -> bool:
    unit, _, parts = value.partition("=")
    matches = [_PART.fullmatch(part) for part in parts.split(",")]
    return unit.strip() == "bytes" and all(
        match is not None and any(match.groups()) and not (all(match.groups()) and int(match[1]) > int(match[2]))
        for match in matches
    )


def _unknown(id: str) -> Response:
    return error(404, f"no activations are kept under {id[:40]!r}; they may have expired", "id")
