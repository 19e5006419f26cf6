"""Routes for steering vectors by name: upload, read, delete."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict

from vllm_weir.errors import WeirError, brief
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.vector_registry import NamedVector, RegistryContents
from vllm_weir.schema.rows import row_width
from vllm_weir.schema.vector_files import Directions, kind_of, read_vectors, to_json
from vllm_weir.server.errors import declared
from vllm_weir.server.names import check_name, check_room
from vllm_weir.server.routes.router import Name, State, deleted, require_admin, unknown, weir_router
from vllm_weir.server.state import ServerState

MEDIA = {
    "application/json": "json",
    "application/safetensors": "safetensors",
    "application/x-safetensors": "safetensors",
    "application/vnd.safetensors": "safetensors",
    "application/gguf": "gguf",
    "application/x-gguf": "gguf",
    "application/octet-stream": "",
}
"""Content type of an upload -> its format; empty if its first bytes tell."""


class VectorInfo(BaseModel):
    """A vector under a name, or directions of blocks.

    `refs` are what stands for its parts in a request (``{"ref": ...}``); with `layers` the name
    itself stands in ``modules`` for all of them, each added to the stream leaving its block.
    `norms` are their Euclidean norms. `shape` is [d_model], [n, d_model] or [n_layers, n, d_model],
    or has another width: that of one head ([d_head]) or of the neurons, say, at whose hook points
    the vector is for.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "happy",
                    "digest": "c1172a3e" * 4,
                    "shape": [256],
                    "layers": [],
                    "refs": ["happy"],
                    "norms": [5.5],
                    "bytes": 1024,
                }
            ]
        }
    )

    name: str
    digest: str
    shape: list[int]
    layers: list[int]
    refs: list[str]
    norms: list[float]
    bytes: int


class VectorContent(VectorInfo):
    """A vector with its content as a JSON upload has it: `vector`, or `directions` by block."""

    vector: dict[str, Any] | None = None
    directions: dict[str, dict[str, Any]] | None = None


class VectorList(BaseModel):
    """All named vectors."""

    vectors: list[VectorInfo]


_UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "description": "A list of numbers [d] or lists of them [n, d] or [layers, n, d], {b64, dtype, "
                    "shape}, {vector: one of these}, or {directions: {block: vector}}.",
                    "anyOf": [{"type": "array"}, {"type": "object"}],
                },
                "examples": {
                    "plain": {"value": {"vector": [0.5, -1.0]}},
                    "blocks": {"value": {"directions": {"3": [0.5, -1.0], "4": [0.25, 0.0]}}},
                },
            },
            "application/vnd.safetensors": {"schema": {"type": "string", "format": "binary"}},
            "application/gguf": {"schema": {"type": "string", "format": "binary"}},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


def router() -> APIRouter:
    """Return the routes PUT, GET, DELETE /v1/vectors/{name} and GET /v1/vectors."""
    routes = weir_router()

    @routes.get("/v1/vectors", responses=declared(401), summary="The named vectors")
    def list_all(state: State) -> VectorList:
        vectors = state.names.read().vectors
        return VectorList(vectors=[describe(name, named) for name, named in sorted(vectors.items())])

    @routes.put(
        "/v1/vectors/{name}",
        dependencies=[Depends(require_admin)],
        responses=declared(400, 401, 403, 413, 507),
        openapi_extra=_UPLOAD,
        summary="Store a vector, or directions of several blocks, under a name, replacing an earlier one",
    )
    async def put(name: Name, request: Request, state: State) -> VectorInfo:
        check_name(name)
        data, media = await request.body(), request.headers.get("content-type", "application/octet-stream")
        capabilities = await state.capabilities()
        return await state.change(lambda: put_vector(state, name, data, media, capabilities))

    @routes.get(
        "/v1/vectors/{name}",
        response_model=VectorContent,
        response_model_exclude_none=True,
        responses=declared(400, 401, 404) | {200: {"content": {"application/vnd.safetensors": {}}}},
        summary="A vector: JSON with its content, or a safetensors file",
    )
    def get(name: Name, state: State, format: Annotated[Literal["json", "safetensors"], Query()] = "json") -> Any:
        named = state.names.read().vectors.get(name)
        if named is None:
            return unknown(_missing(name))
        if format == "safetensors":
            return Response(_safetensors(named), media_type="application/vnd.safetensors")
        return VectorContent(**describe(name, named).model_dump(), **to_json(dict(named.directions)))

    @routes.delete(
        "/v1/vectors/{name}",
        dependencies=[Depends(require_admin)],
        status_code=204,
        response_class=Response,
        responses=declared(401, 403, 404, 507),
        summary="Delete a name; requests already admitted with it go on",
    )
    async def delete(name: Name, state: State) -> Response:
        found = await state.change(lambda: _delete(state, name))
        return deleted(found, _missing(name))

    return routes


def describe(name: str, named: NamedVector) -> VectorInfo:
    """Return the description of a named vector."""
    arrays = {layer: v.array for layer, v in named.directions.items() if v.array is not None}
    first = next(iter(arrays.values()))
    digests = "".join(f"{layer}:{v.digest}" for layer, v in named.directions.items())
    return VectorInfo(
        name=name,
        digest=hashlib.sha256(digests.encode()).hexdigest()[:32] if named.layers else named.directions[None].digest,
        shape=[len(arrays), *first.shape] if named.layers else list(first.shape),
        layers=named.layers,
        refs=[f"{name}[{layer}]" for layer in named.layers] or [name],
        norms=[float(np.linalg.norm(array.astype(np.float64))) for array in arrays.values()],
        bytes=sum(a.nbytes for a in arrays.values()),
    )


def put_vector(state: ServerState, name: str, data: bytes, media: str, capabilities: EngineCapabilities) -> VectorInfo:
    """Keep the vector of an upload under a name, replacing an earlier one; return what is kept."""
    directions = read_vectors(data, _format(media, data), "vector")
    _check(directions, capabilities)

    def edit(contents: RegistryContents) -> RegistryContents:
        if name in contents.modules:
            raise WeirError(f"a module is named {name!r}; unregister it or choose another name", "name")
        after = replace(contents, vectors={**contents.vectors, name: NamedVector(directions)})
        check_room(after, state.limits)
        return after

    return describe(name, state.names.change(edit).vectors.get(name, NamedVector(directions)))


def _format(media: str, data: bytes) -> str:
    file_format = MEDIA.get(media.partition(";")[0].strip().lower())
    if file_format is None:
        raise WeirError(f"unsupported type {brief(media)!r}; send {', '.join(MEDIA)}", "Content-Type")
    return file_format or kind_of(data, "vector")


def _check(directions: Directions, capabilities: EngineCapabilities) -> None:
    for layer, vector in directions.items():
        field = "vector" if layer is None else f"vector.{layer}"
        width = vector.array.shape[-1] if vector.array is not None else 0
        # Rows of other hook points, and parts of them, have other widths. Admission knows which is meant.
        widest = 0 if layer is not None else max(map(row_width, capabilities.shapes.values()), default=0)
        if width != capabilities.d_model and width > widest:
            other = f", and no row has more than {widest} values" if widest > capabilities.d_model else ""
            raise WeirError(f"width {width} does not match the model's {capabilities.d_model}{other}", field)
        if layer is not None and layer >= capabilities.num_layers:
            raise WeirError(
                f"block {layer} does not exist: the model has blocks 0..{capabilities.num_layers - 1}", field
            )


def _delete(state: ServerState, name: str) -> bool:
    found = False

    def edit(contents: RegistryContents) -> RegistryContents:
        nonlocal found
        found = name in contents.vectors
        return replace(contents, vectors={n: v for n, v in contents.vectors.items() if n != name})

    if name in state.names.read().vectors:
        state.names.change(edit)
    return found


def _safetensors(named: NamedVector) -> bytes:
    from safetensors.numpy import save

    arrays: Mapping[str, Any] = {
        "vector" if layer is None else f"direction.{layer}": v.array for layer, v in named.directions.items()
    }
    return save(dict(arrays))


def _missing(name: str) -> str:
    return f"there is no vector named {brief(name)!r}"
