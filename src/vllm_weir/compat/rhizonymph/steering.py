"""Routes for steering every request and for named modules, as in the fork RhizoNymph/vllm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Body, Depends, Query
from fastapi.responses import Response

from vllm_weir.compat.rhizonymph import steering_schemas as bodies
from vllm_weir.compat.rhizonymph.tiers import FORK_HOOKS, TIERS, from_fields
from vllm_weir.errors import WeirError, brief
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.vector_registry import RegistryContents, VectorRegistry
from vllm_weir.schema.hooks import READ_ONLY_HOOKS
from vllm_weir.schema.intervention_base import MAX_INTERVENTIONS, Intervention
from vllm_weir.schema.intervention_kinds import AnyIntervention, Kept
from vllm_weir.schema.interventions import Add, Clamp
from vllm_weir.schema.named_hooks import Use
from vllm_weir.schema.request import parse_interventions
from vllm_weir.schema.user_hooks import Hook
from vllm_weir.schema.vectors import Vector
from vllm_weir.server.errors import declared, error
from vllm_weir.server.names import check_room
from vllm_weir.server.routes.router import require_admin, weir_router
from vllm_weir.server.state import ServerState, server_state

State = Annotated[ServerState, Depends(server_state)]
Target = Annotated[Literal["main", "draft"] | None, Query(description="`draft` is refused.")]
ADMIN = [Depends(require_admin)]


def router() -> APIRouter:
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
        return await state.change(lambda: _set(state, body))

    @routes.post(
        "/v1/steering/clear",
        dependencies=ADMIN,
        responses=declared(400, 401, 403, 413, 507),
        summary="Remove all steering of every request",
    )
    async def clear_steering(state: State, body: Annotated[bodies.ClearSteering | None, Body()] = None) -> bodies.Done:
        _main_only(body.target if body else None)
        await state.change(lambda: state.names.change(lambda c: replace(c, always=(), tiers=0)))
        return bodies.Done()

    @routes.get(
        "/v1/steering",
        response_model_exclude_none=True,
        responses=declared(400, 401),
        summary="The steering of every request",
    )
    def get_steering(state: State, target: Target = None) -> bodies.SteeringState:
        _main_only(target)
        contents = state.names.read()
        active = _active_layers([one for one in contents.always[: contents.tiers] if isinstance(one, Intervention)])
        interventions = [_with_digests(one) for one in contents.always]
        return bodies.SteeringState(active_layers=active, interventions=interventions)

    @routes.get("/v1/steering/layers", responses=declared(400, 401), summary="The hook points that can be steered")
    async def get_layers(state: State, target: Target = None) -> bodies.Layers:
        _main_only(target)
        return bodies.Layers(layers=_layers(await state.capabilities()))


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
                "modules of SAEs are not served; load the SAE with PUT /v1/saes/NAME, and set its features with "
                '{"op": "set_feature"} in interventions',
                "kind" if body.kind != "additive" else "sae_manifest",
            )
        await state.capabilities()
        return await state.change(lambda: register_module(state, body))

    @routes.post(
        "/v1/steering/modules/unregister",
        dependencies=ADMIN,
        response_model=bodies.ModuleChanged,
        responses=declared(400, 401, 403, 404, 413, 507),
        summary="Delete a module; requests already admitted with it go on",
    )
    async def unregister(body: bodies.UnregisterModule, state: State) -> Any:
        return await state.change(lambda: unregister_module(state, body.name))

    @routes.get("/v1/steering/modules", responses=declared(401), summary="The names of the modules")
    def modules(state: State) -> bodies.Modules:
        names = sorted(state.names.read().modules)
        return bodies.Modules(modules=names, count=len(names))


def _main_only(target: str | None) -> None:
    if target == "draft":
        raise WeirError("draft models are not steered: Weir refuses speculative decoding; omit target", "target")


def _parse_fields(body: bodies.Fields) -> tuple[list[Intervention], tuple[AnyIntervention, ...] | None]:
    """Return the interventions of the fork's fields, and Weir's own list or None."""
    tiers = from_fields({f"{p}{kind}": getattr(body, f"{p}{kind}") for p in TIERS for kind in ("vectors", "clamps")})
    own = None if body.interventions is None else parse_interventions(body.interventions, "interventions")
    if not tiers and not own:
        raise WeirError(
            "nothing to apply: give vectors, prefill_vectors or decode_vectors {hook: {layer: vector}}, clamps, "
            "or interventions; use /clear to remove steering",
            "vectors",
        )
    return tiers, own


def _set(state: ServerState, body: bodies.SetSteering) -> bodies.SteeringSet:
    tiers, own = _parse_fields(body)
    layers: set[int] = set()
    fields = (getattr(body, f"{p}{kind}") for p in TIERS for kind in ("vectors", "clamps"))
    hooks = {hook for given in fields for hook, of_layers in (given or {}).items() if of_layers}  # as they were sent

    def edit(contents: RegistryContents) -> RegistryContents:
        from_tiers, from_list = _resolve_names(state, contents, tiers, own or ())
        capabilities = state.frontend.engine.require_capabilities()
        hooks.update(one.hook for one in from_list)
        for one in (*from_tiers, *from_list):
            layers.update(one.resolve_layers(capabilities.num_layers))
        before = () if body.replace else contents.always
        replaced = {_replacement_key(one) for one in from_tiers}
        kept = [one for one in before[: contents.tiers] if _replacement_key(one) not in replaced]
        # Stable: additions stay in order, and clamps follow them.
        merged = sorted((*kept, *from_tiers), key=lambda one: isinstance(one, Clamp))
        rest = tuple(before[contents.tiers :]) if own is None else _kept(own, from_list)
        if len(merged) + len(rest) > MAX_INTERVENTIONS:
            raise WeirError(f"more than {MAX_INTERVENTIONS} interventions for every request; clear some", "vectors")
        after = replace(contents, always=(*merged, *rest), tiers=len(merged))
        state.frontend.names.settled(after.always, everyone=True)  # together they must fit, too
        check_room(after, state.limits)
        return after

    state.names.change(edit)
    return bodies.SteeringSet(hook_points=sorted(hooks), layers_updated=sorted(layers))


def _resolve_names(
    state: ServerState, contents: RegistryContents, *parts: Sequence[AnyIntervention]
) -> list[tuple[Intervention, ...]]:
    """Return interventions with vectors in place of names."""
    state.frontend.names.refresh()  # another process may have loaded the autoencoders that are named
    registry = VectorRegistry()
    registry.load(contents)
    return [state.frontend.names.settled(part, registry) for part in parts]


def _kept(given: Sequence[AnyIntervention], settled: Sequence[Intervention]) -> tuple[Kept, ...]:
    """Return what is stored of interventions, in which a hook stays a name: code is not shared."""
    pairs = zip(given, settled, strict=True)
    return tuple(one.settled(hook) if isinstance(one, Use) and isinstance(hook, Hook) else hook for one, hook in pairs)


def _replacement_key(one: Kept) -> tuple[Any, ...]:
    """Return the key under which an intervention of the fork's fields replaces an earlier one."""
    return type(one), getattr(one, "hook", ""), one.layers, one.positions


def register_module(state: ServerState, body: bodies.RegisterModule) -> bodies.ModuleChanged:
    """Keep a module under its name, replacing an earlier one; raise WeirError if the engine cannot carry it out."""
    tiers, own = _parse_fields(body)

    def edit(contents: RegistryContents) -> RegistryContents:
        if body.name in contents.vectors:
            raise WeirError(f"a vector is named {body.name!r}; delete it or choose another name", "name")
        from_tiers, from_list = _resolve_names(state, contents, tiers, own or ())
        state.frontend.names.settled((*from_tiers, *from_list))
        kept = (*from_tiers, *_kept(own or (), from_list))
        after = replace(contents, modules={**contents.modules, body.name: kept})
        check_room(after, state.limits)
        return after

    return _change_modules(state, body.name, edit)


def unregister_module(state: ServerState, name: str) -> bodies.ModuleChanged | Response:
    registered = state.names.read().modules
    if name not in registered:
        why = f"no module is registered as {brief(name)!r}; registered are {', '.join(registered) or 'none'}"
        return error(404, why[:2000], "name")
    return _change_modules(state, name, lambda c: replace(c, modules={n: m for n, m in c.modules.items() if n != name}))


def _change_modules(
    state: ServerState, name: str, edit: Callable[[RegistryContents], RegistryContents]
) -> bodies.ModuleChanged:
    return bodies.ModuleChanged(name=name, modules=sorted(state.names.change(edit).modules))


def _active_layers(always: Sequence[Intervention]) -> dict[str, dict[str, bodies.ActiveHook]]:
    """Return the norms of what is added and the numbers of clamps, by block and hook point."""
    sums: dict[tuple[int, str], dict[str, Any]] = {}
    clamps: dict[tuple[int, str], int] = {}
    for one in always:
        for layer in one.layers:
            if isinstance(one, Add):
                tier = sums.setdefault((layer, one.hook), {})
                positions = one.positions.kind
                # A row of heads may be given as [heads, d_head] or flat.
                flat = one.vector.array.astype(np.float64).reshape(-1)
                tier[positions] = tier.get(positions, 0) + np.float64(one.scale) * flat
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
        out.setdefault(str(layer), {}).update(dict.fromkeys(_names_of(hook), active))
    return out


def _names_of(hook: str) -> tuple[str, ...]:
    return (hook, FORK_HOOKS[hook]) if hook in FORK_HOOKS else (hook,)


def _with_digests(one: Kept) -> dict[str, Any]:
    """Return an intervention's wire form, with vectors by digest."""
    return one.with_vectors(lambda vector, _at: Vector(ref=vector.digest)).to_json()


def _layers(capabilities: EngineCapabilities) -> dict[str, bodies.LayerPoints]:
    out: dict[str, bodies.LayerPoints] = {}
    for site, refusal in sorted(capabilities.sites.items(), key=lambda entry: entry[0].layer):
        if not refusal and site.hook not in READ_ONLY_HOOKS:
            out.setdefault(str(site.layer), bodies.LayerPoints(hook_points=[])).hook_points.extend(_names_of(site.hook))
    return out
