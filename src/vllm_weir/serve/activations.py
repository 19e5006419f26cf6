"""Captured rows by reference."""

from __future__ import annotations

from typing import Annotated, BinaryIO

from fastapi import APIRouter, Depends, Path
from fastapi.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from vllm_weir.serve.errors import declared, error
from vllm_weir.serve.state import ServerState, server_state

MEDIA = "application/octet-stream"
Id = Annotated[str, Path(description="The id that the choice's `weir.activations.id` says.")]
State = Annotated[ServerState, Depends(server_state)]


class HeldFile(FileResponse):
    """An open file, also one that is deleted while it is read."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        super().__init__(f"/proc/self/fd/{file.fileno()}", media_type=MEDIA, filename=name)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


def router() -> APIRouter:
    """GET and DELETE /v1/activations/{id}."""
    routes = APIRouter(tags=["weir"])

    @routes.get(
        "/v1/activations/{id}",
        response_class=FileResponse,
        responses={200: {"content": {MEDIA: {}}}, 206: {"content": {MEDIA: {}}}, **declared(400, 401, 404)},
        summary="Rows of one choice, as a safetensors file; Range is honoured",
    )
    def fetch(id: Id, state: State) -> Response:
        file = state.spool.open(id) if state.spool is not None else None
        return _unknown(id) if file is None else HeldFile(file, f"{id}.safetensors")

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


def _unknown(id: str) -> Response:
    return error(404, f"no activations are kept under {id[:40]!r}; they may have expired", "id")
