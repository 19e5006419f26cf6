"""Routes for probes by name: upload, read, delete; and those that score every request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict

from vllm_weir.errors import WeirError, brief
from vllm_weir.frontend.admission.registries import RegisteredProbe
from vllm_weir.schema.fields import is_json
from vllm_weir.server import probes
from vllm_weir.server.errors import declared
from vllm_weir.server.routes.router import Name, State, deleted, require_admin, unknown, weir_router
from vllm_weir.server.state import ServerState

FILES = ("application/safetensors", "application/x-safetensors", "application/vnd.safetensors")
JSON, UNKNOWN = "application/json", "application/octet-stream"


class ProbeInfo(BaseModel):
    """A probe that the server keeps.

    `outputs` is the number of scores of each position, `bytes` are those of the weights.
    `everyone` says whether it scores every request; `buckets` are then the upper bounds of the
    histogram of its scores, and `alert` the threshold above which a sequence is counted: a number,
    or a list with one (or null) for each of several outputs.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "refusal",
                    "kind": "linear",
                    "hook": "resid_post",
                    "layer": 3,
                    "outputs": 1,
                    "activation": "sigmoid",
                    "positions": "sampled",
                    "everyone": True,
                    "alert": 0.9,
                    "buckets": [0.1, 0.5, 0.9],
                    "bytes": 1024,
                }
            ]
        }
    )

    name: str
    kind: str
    hook: str
    layer: int
    outputs: int
    activation: str
    positions: Any
    smooth: list[Any] | None = None
    head: int | None = None
    everyone: bool
    alert: float | list[float | None] | None = None
    buckets: list[float] | None = None
    bytes: int


class ProbeContent(ProbeInfo):
    """A probe with its weights, as a JSON upload has them; which there are depends on its kind."""

    model_config = ConfigDict(extra="allow")


class ProbeList(BaseModel):
    """All probes that the server keeps."""

    probes: list[ProbeInfo]


_UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            JSON: {
                "schema": {
                    "type": "object",
                    "description": "A probe's wire form, of which name and kind (linear) may be left out, with "
                    "everyone, alert and buckets.",
                },
                "examples": {
                    "linear": {
                        "value": {"weight": [0.5, -1.0], "bias": 0.1, "layer": 3, "activation": "sigmoid"},
                    },
                    "everyone": {
                        "value": {
                            "weight": [0.5, -1.0],
                            "layer": 3,
                            "activation": "sigmoid",
                            "everyone": True,
                            "alert": 0.9,
                        }
                    },
                },
            },
            "application/vnd.safetensors": {"schema": {"type": "string", "format": "binary"}},
            UNKNOWN: {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


def router() -> APIRouter:
    """Return the routes PUT, GET, DELETE /v1/probes/{name} and GET /v1/probes."""
    routes = weir_router()
    _reading(routes)

    @routes.put(
        "/v1/probes/{name}",
        dependencies=[Depends(require_admin)],
        response_model_exclude_none=True,
        responses=declared(400, 401, 403, 413, 507),
        openapi_extra=_UPLOAD,
        summary="Keep a probe under a name, replacing an earlier one; with everyone it scores every request",
    )
    async def put(
        name: Name,
        request: Request,
        state: State,
        everyone: Annotated[bool | None, Query(description="With a file.")] = None,
        alert: Annotated[list[float] | None, Query(description="With a file; one for each output.")] = None,
        bucket: Annotated[list[float] | None, Query(description="With a file: the upper bounds.")] = None,
    ) -> ProbeInfo:
        probes.check_probe_name(name)
        data, media = await request.body(), request.headers.get("content-type", UNKNOWN)
        settings = {"everyone": everyone, "alert": alert, "buckets": bucket}
        await state.capabilities()
        return await state.change(lambda: _put(state, name, data, media, settings))

    @routes.delete(
        "/v1/probes/{name}",
        dependencies=[Depends(require_admin)],
        status_code=204,
        response_class=Response,
        responses=declared(400, 401, 403, 404, 507),
        summary="Delete a name; requests already admitted go on",
    )
    async def delete(name: Name, state: State) -> Response:
        found = await state.change(lambda: probes.forget(state, name))
        return deleted(found, _missing(name))

    return routes


def _reading(routes: APIRouter) -> None:
    @routes.get(
        "/v1/probes",
        response_model_exclude_none=True,
        responses=declared(401),
        summary="The probes that the server keeps",
    )
    def list_all(state: State) -> ProbeList:
        return ProbeList(probes=[describe(one) for _, one in sorted(state.names.read().probes.items())])

    @routes.get(
        "/v1/probes/{name}",
        response_model=ProbeContent,
        response_model_exclude_none=True,
        responses=declared(400, 401, 404) | {200: {"content": {"application/vnd.safetensors": {}}}},
        summary="A probe: JSON with its weights, or a safetensors file",
    )
    def get(name: Name, state: State, format: Annotated[Literal["json", "safetensors"], Query()] = "json") -> Any:
        kept = state.names.read().probes.get(name)
        if kept is None:
            return unknown(_missing(name))
        if format == "safetensors":
            return Response(kept.probe.to_bytes(), media_type="application/vnd.safetensors")
        return ProbeContent(**kept.probe.to_json() | describe(kept).model_dump())


def describe(kept: RegisteredProbe) -> ProbeInfo:
    """Return the description of a probe."""
    probe, alerts = kept.probe, list(kept.alerts)
    assert probe.outputs is not None, "its weights are arrays"
    return ProbeInfo(
        name=probe.name,
        kind=probe.kind,
        hook=probe.hook,
        layer=probe.layer,
        outputs=probe.outputs,
        activation=probe.activation,
        positions=probe.positions.to_json(),
        smooth=None if probe.smooth is None else list(probe.smooth),
        head=probe.head,
        everyone=kept.everyone,
        alert=alerts[0] if len(alerts) == 1 else alerts or None,
        buckets=list(kept.buckets) or None,
        bytes=sum(vector.array.nbytes for vector in probe.given if vector.array is not None),
    )


def _put(state: ServerState, name: str, data: bytes, media: str, settings: dict[str, Any]) -> ProbeInfo:
    kind = media.partition(";")[0].strip().lower()
    as_json = kind == JSON or (kind == UNKNOWN and is_json(data))
    if not as_json and kind not in (*FILES, UNKNOWN):
        raise WeirError(f"unsupported type {brief(media)!r}; send {', '.join((JSON, *FILES, UNKNOWN))}", "Content-Type")
    if as_json:
        for given in (key for key, value in settings.items() if value is not None):
            raise WeirError("a JSON body has it itself; the query is for files", given)
        upload = probes.read_json(name, data)
    else:
        upload = probes.read_file(name, data, {key: value for key, value in settings.items() if value is not None})
    return describe(probes.keep(state, upload))


def _missing(name: str) -> str:
    return f"no probe is kept as {brief(name)!r}"
