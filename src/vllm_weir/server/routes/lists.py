"""The routes that list what a server's operator has named: hooks and fitted lenses."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from vllm_weir.server.errors import declared
from vllm_weir.server.routes.router import State, weir_router


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
    """Return the routes GET /v1/hooks and GET /v1/lenses."""
    routes = weir_router()

    @routes.get(
        "/v1/hooks",
        name="list_all",
        responses=declared(401),
        summary="The functions that requests may name in `hooks`",
    )
    def list_hooks(state: State) -> HookList:
        infos = state.frontend.names.hooks.infos()
        return HookList(hooks=[RegisteredHook(name=name, **info) for name, info in infos.items()])

    @routes.get(
        "/v1/lenses",
        name="list_all",
        responses=declared(401),
        summary="The fitted lenses that requests may name in `lens`",
    )
    def list_lenses(state: State) -> LensList:
        infos = state.frontend.names.lenses.infos()
        return LensList(lenses=[NamedLens(name=name, **info) for name, info in infos.items()])

    return routes
