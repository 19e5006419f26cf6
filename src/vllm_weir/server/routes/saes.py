"""Routes for sparse autoencoders: load, list, unload."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from vllm_weir.errors import brief
from vllm_weir.schema.read_outs import SAEInfo
from vllm_weir.server import saes
from vllm_weir.server.errors import declared
from vllm_weir.server.routes.router import Name, State, deleted, require_admin, unknown, weir_router


class SAEFiles(BaseModel):
    """Where an autoencoder is: a directory of SAELens, or Gemma Scope's npz.

    `path` is on the server's disk. `site`, a hook point and a block, is for files that do not say
    them.
    """

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"path": "/data/saes/mood", "site": ["resid_post", 3]}]}
    )

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    site: tuple[str, int] | None = None


class LoadedSAE(BaseModel):
    """An autoencoder on the workers; `bytes` are those of its weights on each of them.

    `layers` are the blocks of a cross-layer transcoder, whose first is `layer`; else it is empty.
    """

    name: str
    hook: str
    layer: int
    d_sae: int
    architecture: str
    bytes: int
    layers: list[int]


class LabelledSAE(LoadedSAE):
    """An autoencoder with what its features stand for, where its files say it."""

    labels: dict[int, str]


class SAEList(BaseModel):
    """All loaded autoencoders."""

    saes: list[LoadedSAE]


def router() -> APIRouter:
    """Return the routes PUT, GET, DELETE /v1/saes/{name} and GET /v1/saes."""
    routes = weir_router()

    @routes.get("/v1/saes", responses=declared(401), summary="The loaded sparse autoencoders")
    def list_all(state: State) -> SAEList:
        return SAEList(saes=[_describe(one) for one in saes.infos(state)])

    @routes.put(
        "/v1/saes/{name}",
        dependencies=[Depends(require_admin)],
        responses=declared(400, 401, 403, 413, 507),
        summary="Load a sparse autoencoder from the server's disk onto the workers, under a name that is free",
    )
    async def put(name: Name, body: SAEFiles, state: State) -> LoadedSAE:
        return _describe(await saes.load(state, name, saes.SAESource(body.path, body.site)))

    @routes.get(
        "/v1/saes/{name}",
        response_model=LabelledSAE,
        responses=declared(401, 404),
        summary="A loaded sparse autoencoder, and the labels of its features",
    )
    def get(name: Name, state: State) -> Any:
        info = next((one for one in saes.infos(state) if one.name == name), None)
        if info is None:
            return unknown(_missing(name))
        return LabelledSAE(**_describe(info).model_dump(), labels=dict(info.labels))

    @routes.delete(
        "/v1/saes/{name}",
        dependencies=[Depends(require_admin)],
        status_code=204,
        response_class=Response,
        responses=declared(400, 401, 403, 404, 507),
        summary="Unload a sparse autoencoder; requests that have begun go on, waiting ones that encode rows fail",
    )
    async def delete(name: Name, state: State) -> Response:
        return deleted(await saes.unload(state, name), _missing(name))

    return routes


def _missing(name: str) -> str:
    return f"no autoencoder is loaded as {brief(name)!r}"


def _describe(info: SAEInfo) -> LoadedSAE:
    return LoadedSAE(
        name=info.name,
        hook=info.site.hook,
        layer=info.site.layer,
        d_sae=info.d_sae,
        architecture=info.architecture,
        bytes=info.bytes,
        layers=list(info.layers),
    )
