"""Steering of every request, and named modules: the routes and bodies of the fork RhizoNymph/vllm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Body, Depends, Query
from fastapi.responses import Response

from vllm_weir.errors import WeirError, brief
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.vector_registry import RegistryContents, VectorRegistry
from vllm_weir.schema.compat.three_tier import TIERS, from_fields
from vllm_weir.schema.intervention_base import Intervention
from vllm_weir.schema.interventions import Add, Clamp
from vllm_weir.schema.request import MAX_INTERVENTIONS, parse_interventions
from vllm_weir.schema.vectors import Vector
from vllm_weir.server.errors import declared, error
from vllm_weir.server.routes import steering_schemas as bodies
from vllm_weir.server.routes.auth import require_admin
from vllm_weir.server.routes.router import weir_router
from vllm_weir.server.routes.vectors import check_room
from vllm_weir.server.state import ServerState, server_state

State = Annotated[ServerState, Depends(server_state)]
Target = Annotated[Literal["main", "draft"] | None, Query(description="`draft` is refused: no draft model is steered.")]
ADMIN = [Depends(require_admin)]


def router() -> APIRouter:
    """/v1/steering and /v1/steering/modules."""
    routes = weir_router()
    _steering(routes)
    _modules(routes)
    return routes


def _steering(routes: APIRouter) -> None:
    @routes.post(
        "/v1/steering/set",
        dependencies=ADMIN,
        responses=declared(400, 401, 403, 413, 507),
        summary="Steer every request that is admitted from now on",
    )
    async def set_steering(body: bodies.SetSteering, state: State) -> bodies.SteeringSet:
        _main_only(body.target)
        await state.capabilities()
        return await state.run(lambda: _set(state, body))

    @routes.post(
        "/v1/steering/clear",
        dependencies=ADMIN,
        responses=declared(400, 401, 403, 413, 507),
        summary="Steer no request but those that ask for it",
    )
    async def clear_steering(state: State, body: Annotated[bodies.ClearSteering | None, Body()] = None) -> bodies.Done:
        _main_only(body.target if body else None)
        await state.run(lambda: state.names.change(lambda c: replace(c, always=(), tiers=0)))
        return bodies.Done()

    @routes.get(
        "/v1/steering",
        response_model_exclude_none=True,
        responses=declared(400, 401),
        summary="What every request undergoes",
    )
    def get_steering(state: State, target: Target = None) -> bodies.SteeringState:
        _main_only(target)
        contents = state.names.read()
        return bodies.SteeringState(
            active_layers=_active(contents.always[: contents.tiers]), interventions=[_shown(i) for i in contents.always]
        )

    @routes.get("/v1/steering/layers", responses=declared(400, 401), summary="The hook points that can be steered")
    async def get_layers(state: State, target: Target = None) -> bodies.Layers | bodies.LayersOfModels:
        _main_only(target)
        layers = _layers(await state.capabilities())
        return bodies.Layers(layers=layers) if target else bodies.LayersOfModels(layers={"main": layers})


def _modules(routes: APIRouter) -> None:
    @routes.post(
        "/v1/steering/modules/register",
        dependencies=ADMIN,
        responses=declared(400, 401, 403, 413, 507),
        summary="Keep interventions under a name, for requests to use; replaces what was there",
    )
    async def register(body: bodies.RegisterModule, state: State) -> bodies.ModuleChanged:
        if body.kind != "additive" or body.sae_manifest is not None:
            raise WeirError(
                "modules of SAEs are not served: no weights are read from paths or addresses that clients name; "
                "register the features' directions as vectors and clamps",
                "kind" if body.kind != "additive" else "sae_manifest",
            )
        await state.capabilities()
        return await state.run(lambda: _register(state, body))

    @routes.post(
        "/v1/steering/modules/unregister",
        dependencies=ADMIN,
        response_model=bodies.ModuleChanged,
        responses=declared(400, 401, 403, 404, 413, 507),
        summary="Forget a module; requests that were admitted with it go on",
    )
    async def unregister(body: bodies.UnregisterModule, state: State) -> Any:
        return await state.run(lambda: _unregister(state, body.name))

    @routes.get("/v1/steering/modules", responses=declared(401), summary="The names of the modules")
    def modules(state: State) -> bodies.Modules:
        names = sorted(state.names.read().modules)
        return bodies.Modules(modules=names, count=len(names))


def _main_only(target: str | None) -> None:
    if target == "draft":
        raise WeirError("no draft model is steered: Weir refuses speculative decoding; leave target out", "target")


def _given(body: bodies.Fields) -> tuple[list[Intervention], tuple[Intervention, ...] | None]:
    """(what the fork's fields ask, Weir's own list or None); refused if there is neither."""
    tiers = from_fields({f"{p}{kind}": getattr(body, f"{p}{kind}") for p in TIERS for kind in ("vectors", "clamps")})
    own = None if body.interventions is None else parse_interventions(body.interventions, "interventions")
    if not tiers and not own:
        raise WeirError(
            "there is nothing in it: give vectors, prefill_vectors or decode_vectors {hook: {layer: vector}}, clamps, "
            "or interventions; /clear takes steering away",
            "vectors",
        )
    return tiers, own


def _set(state: ServerState, body: bodies.SetSteering) -> bodies.SteeringSet:
    tiers, own = _given(body)
    layers: set[int] = set()

    def edit(contents: RegistryContents) -> RegistryContents:
        settled, others = _settle(state, contents, tiers, own or ())
        capabilities = state.frontend.require_capabilities()
        layers.update(layer for one in (*settled, *others) for layer in one.resolve_layers(capabilities.num_layers))
        before = () if body.replace else contents.always
        keys = {_place(one) for one in settled}
        kept = [one for one in before[: contents.tiers] if _place(one) not in keys]
        merged = sorted((*kept, *settled), key=lambda one: isinstance(one, Clamp))  # stable: additions, then clamps
        rest = tuple(before[contents.tiers :]) if own is None else others
        if len(merged) + len(rest) > MAX_INTERVENTIONS:
            raise WeirError(f"more than {MAX_INTERVENTIONS} interventions of every request; clear some", "vectors")
        after = replace(contents, always=(*merged, *rest), tiers=len(merged))
        state.frontend.settled(after.always, everyone=True)  # all of it together has to fit, too
        check_room(after, state.limits)
        return after

    state.names.change(edit)
    hooks = sorted({one.hook for one in (*tiers, *(own or ()))})
    return bodies.SteeringSet(hook_points=hooks, layers_updated=sorted(layers))


def _settle(
    state: ServerState, contents: RegistryContents, *parts: Sequence[Intervention]
) -> list[tuple[Intervention, ...]]:
    """Interventions with the content of the names they use; raises WeirError if the engine cannot do them."""
    registry = VectorRegistry()
    registry.load(contents)
    return [state.frontend.settled(part, registry) for part in parts]


def _place(one: Intervention) -> tuple[Any, ...]:
    """What a later one of the fork's fields replaces."""
    return type(one), one.hook, one.layers, one.positions


def _register(state: ServerState, body: bodies.RegisterModule) -> bodies.ModuleChanged:
    tiers, own = _given(body)

    def edit(contents: RegistryContents) -> RegistryContents:
        if body.name in contents.vectors:
            raise WeirError(f"a vector is kept as {body.name!r}; delete it or take another name", "name")
        settled, others = _settle(state, contents, tiers, own or ())
        state.frontend.settled((*settled, *others))
        after = replace(contents, modules={**contents.modules, body.name: (*settled, *others)})
        check_room(after, state.limits)
        return after

    return _changed(state, body.name, edit)


def _unregister(state: ServerState, name: str) -> bodies.ModuleChanged | Response:
    have = state.names.read().modules
    if name not in have:
        return error(
            404, f"no module is registered as {brief(name)!r}; there are {', '.join(have) or 'none'}"[:2000], "name"
        )
    return _changed(state, name, lambda c: replace(c, modules={n: m for n, m in c.modules.items() if n != name}))


def _changed(
    state: ServerState, name: str, edit: Callable[[RegistryContents], RegistryContents]
) -> bodies.ModuleChanged:
    return bodies.ModuleChanged(name=name, modules=sorted(state.names.change(edit).modules))


def _active(always: Sequence[Intervention]) -> dict[str, dict[str, bodies.ActiveHook]]:
    """Norms of what is added, and numbers of clamps, by block and hook point."""
    sums: dict[tuple[int, str], dict[str, Any]] = {}
    clamps: dict[tuple[int, str], int] = {}
    for one in always:
        for layer in one.layers:
            if isinstance(one, Add):
                tier = sums.setdefault((layer, one.hook), {})
                positions = one.positions.kind
                tier[positions] = tier.get(positions, 0) + np.float64(one.scale) * one.vector.array.astype(np.float64)
            else:
                clamps[layer, one.hook] = clamps.get((layer, one.hook), 0) + 1
    out: dict[str, dict[str, bodies.ActiveHook]] = {}
    for layer, hook in sorted({*sums, *clamps}):
        norms = {tier: float(np.linalg.norm(total)) for tier, total in sums.get((layer, hook), {}).items()}
        active = bodies.ActiveHook(
            norm=norms.get("all"),
            prefill_norm=norms.get("prompt"),
            decode_norm=norms.get("generated"),
            clamps=clamps.get((layer, hook), 0),
        )
        out.setdefault(str(layer), {})[hook] = active
    return out


def _shown(one: Intervention) -> dict[str, Any]:
    """Its wire form, vectors by digest."""
    return one.with_vectors(lambda vector, _at: Vector(ref=vector.digest)).to_json()


def _layers(capabilities: EngineCapabilities) -> dict[str, bodies.LayerPoints]:
    out: dict[str, bodies.LayerPoints] = {}
    for site, why in sorted(capabilities.sites.items(), key=lambda entry: entry[0].layer):
        if not why:
            out.setdefault(str(site.layer), bodies.LayerPoints(hook_points=[])).hook_points.append(site.hook)
    return out
