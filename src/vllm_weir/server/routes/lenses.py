"""The route that lists the lenses which requests may name."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel

from vllm_weir.server.errors import declared
from vllm_weir.server.routes.router import weir_router
from vllm_weir.server.state import ServerState, server_state


class NamedLens(BaseModel):
    """A fitted lens that the server's operator has named.

    `layers` are the blocks that it has a matrix of; the last block needs none.
    """

    name: str
    kind: str
    layers: list[int]
    d_model: int
    n_prompts: int | None = None


class LensList(BaseModel):
    """All named lenses."""

    lenses: list[NamedLens]


def router() -> APIRouter:
    """Return the route GET /v1/lenses."""
    routes = weir_router()

    @routes.get("/v1/lenses", responses=declared(401), summary="The fitted lenses that requests may name in `lens`")
    def list_all(state: Annotated[ServerState, Depends(server_state)]) -> LensList:
        told = state.frontend.names.lenses.infos()
        return LensList(lenses=[NamedLens(name=name, **one) for name, one in told.items()])

    return routes
