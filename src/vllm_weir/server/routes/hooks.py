"""The route that lists the hooks which requests may name."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel

from vllm_weir.server.errors import declared
from vllm_weir.server.routes.router import weir_router
from vllm_weir.server.state import ServerState, server_state


class RegisteredHook(BaseModel):
    """A function that the server's operator has loaded.

    `args` has what a request may replace: a number or text, or the dtype and shape of a tensor.
    """

    name: str
    function: str
    hook: str
    layers: str | list[int]
    positions: Any
    args: dict[str, Any]
    mode: str
    state: list[int]


class HookList(BaseModel):
    """All hooks."""

    hooks: list[RegisteredHook]


def router() -> APIRouter:
    """Return the route GET /v1/hooks."""
    routes = weir_router()

    @routes.get("/v1/hooks", responses=declared(401), summary="The functions that requests may name in `hooks`")
    def list_all(state: Annotated[ServerState, Depends(server_state)]) -> HookList:
        told = state.frontend.names.hooks.infos()
        return HookList(hooks=[RegisteredHook(name=name, **one) for name, one in told.items()])

    return routes
