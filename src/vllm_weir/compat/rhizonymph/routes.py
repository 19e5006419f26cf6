"""Routes of the fork RhizoNymph/vllm for the vectors that gates name, and for what steers by itself."""

from __future__ import annotations

from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, SkipValidation

from vllm_weir.compat.rhizonymph import steering
from vllm_weir.compat.rhizonymph.requests import one_probe
from vllm_weir.compat.rhizonymph.steering import ADMIN, State
from vllm_weir.compat.rhizonymph.steering_schemas import PackedVectors, PatchSweep, RegisterModule
from vllm_weir.compat.rhizonymph.sweep import NO_RUNS, Sweeper
from vllm_weir.errors import brief
from vllm_weir.schema.gates import PREFIX
from vllm_weir.server import probes
from vllm_weir.server.errors import declared, error
from vllm_weir.server.routes.router import weir_router
from vllm_weir.server.state import ServerState

Kind = Literal["probe", "steer"]
Name = Annotated[str, Field(min_length=1, max_length=128)]


class RegisterVector(BaseModel):
    """A probe, one vector at one block, or vectors to add, under a name for gates."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "name": "cheerful",
                    "kind": "steer",
                    "packed": {
                        "post_block": {
                            "dtype": "float32",
                            "shape": [1, 2],
                            "layer_indices": [3],
                            "data": "AAAAPwAAgL8=",
                        }
                    },
                }
            ]
        },
    )
    name: Name
    kind: Kind
    packed: Annotated[dict[str, PackedVectors], SkipValidation]


class UnregisterVector(BaseModel):
    """The name to delete."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"name": "cheerful", "kind": "steer"}]})
    name: Name
    kind: Kind


class VectorNames(BaseModel):
    """All names by kind: a `probe` is any that the server keeps, `steer` is any module."""

    vectors: dict[Kind, list[str]]
    count: int


class VectorChanged(BaseModel):
    """A change of one name; `vectors` has all after it."""

    status: Literal["ok"] = "ok"
    name: str
    kind: Kind
    vectors: dict[Kind, list[str]]


class DynamicState(BaseModel):
    """What steers by itself, in the process that answers: a dict whose `controllers` have their counts by name."""

    workers: list[dict[str, Any]]


def router() -> APIRouter:
    """Return the routes /v1/steering/vectors, /v1/steering/dynamic, /v1/patch_sweep and /v1/patch_source."""
    routes = weir_router()
    _vectors(routes)

    @routes.get("/v1/steering/dynamic", responses=declared(401), summary="The controllers of this process")
    def dynamic(state: State) -> DynamicState:
        controllers: dict[str, Any] = {
            name: {"kind": "sync", "probes": [getattr(probe, "name", probe) for probe in read]}
            for name, read in state.frontend.names.probes.controllers.items()
        }
        shown = ("queued", "queued_bytes", "sequences", "dropped", "failed")
        for name, report in state.frontend.manager.report().items():
            if name.startswith(PREFIX):
                controllers[name.removeprefix(PREFIX)] = {"kind": "async", **{key: report[key] for key in shown}}
        return DynamicState(workers=[{"controllers": controllers}])

    @routes.post("/v1/patch_sweep", include_in_schema=False)
    async def patch_sweep(body: PatchSweep, state: State) -> Any:
        sweeper = Sweeper(state)
        plan = await sweeper.plan(body)
        if body.stream:
            return StreamingResponse(sweeper.stream(plan), media_type="text/event-stream")
        async with aclosing(sweeper.events(plan)) as events:
            async for event in events:
                if event.pop("type") == "summary":
                    return event
        raise AssertionError("the last event is the summary")

    @routes.delete("/v1/patch_source/{run_id}", include_in_schema=False)
    def patch_source(run_id: str) -> Response:
        return error(404, NO_RUNS, "run_id")

    return routes


def _vectors(routes: APIRouter) -> None:
    @routes.post(
        "/v1/steering/vectors/register",
        dependencies=ADMIN,
        responses=declared(400, 401, 403, 413, 507),
        summary="Keep a probe, or vectors to add, under a name for the gates of requests",
    )
    async def register(body: RegisterVector, state: State) -> VectorChanged:
        if body.kind == "probe":
            probes.check_probe_name(body.name)
        await state.capabilities()
        return await state.change(lambda: _register(state, body))

    @routes.post(
        "/v1/steering/vectors/unregister",
        dependencies=ADMIN,
        response_model=VectorChanged,
        responses=declared(400, 401, 403, 404, 413, 507),
        summary="Delete a name; requests already admitted with it go on",
    )
    async def unregister(body: UnregisterVector, state: State) -> Any:
        return await state.change(lambda: _unregister(state, body))

    @routes.get("/v1/steering/vectors", responses=declared(401), summary="The names that gates may use")
    def names(state: State) -> VectorNames:
        vectors = _names(state)
        return VectorNames(vectors=vectors, count=sum(map(len, vectors.values())))


def _names(state: ServerState) -> dict[Kind, list[str]]:
    contents = state.names.read()
    return {"probe": sorted(contents.probes), "steer": sorted(contents.modules)}


def _register(state: ServerState, body: RegisterVector) -> VectorChanged:
    if body.kind == "probe":
        probe = one_probe({"packed": body.packed}, body.name, "body")
        probes.keep(state, probes.Upload(probe, {}))
    else:
        steering.register_module(state, RegisterModule(name=body.name, vectors={**body.packed}))
    return VectorChanged(name=body.name, kind=body.kind, vectors=_names(state))


def _unregister(state: ServerState, body: UnregisterVector) -> VectorChanged | Response:
    if body.name not in _names(state)[body.kind]:
        return error(404, f"no {body.kind} is registered as {brief(body.name)!r}", "name")
    forget = probes.forget if body.kind == "probe" else steering.unregister_module
    forget(state, body.name)
    return VectorChanged(name=body.name, kind=body.kind, vectors=_names(state))
