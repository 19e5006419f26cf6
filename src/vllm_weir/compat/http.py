"""What other systems ask over HTTP, translated into Weir's form, and what they are answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_weir.compat.rhizonymph.requests import KnownNames, from_gates, from_patch, parse_table
from vllm_weir.compat.rhizonymph.tiers import from_tiers
from vllm_weir.compat.vllm_lens.tensors import serialize_tensor
from vllm_weir.errors import WeirError
from vllm_weir.results.activations import LENS_KEY, Activations
from vllm_weir.schema.keys import FORK_LISTS, LENS_CAPTURE_KEY, WIRE_KEY, fork_fields
from vllm_weir.schema.keys import FORK_NAME as NAME
from vllm_weir.schema.keys import FORK_TIERS as TIERS
from vllm_weir.schema.request import WIRE_VERSION
from vllm_weir.server.request import WeirRequest
from vllm_weir.server.state import ServerState


async def known_names(state: ServerState) -> KnownNames:
    """Return what the fork's gates and patches may refer to; raise WeirError if the engine serves none of it."""
    capabilities = await state.capabilities()
    state.frontend.names.refresh()
    return KnownNames(state.frontend.names.vectors.module, capabilities.d_model)


def translate(request: WeirRequest, body: Mapping[str, Any], names: KnownNames | None = None) -> WeirRequest:
    """Return the request with what a body asks in fields of other systems.

    Args:
        request: What it asks in Weir's.
        body: The fields that vLLM does not know.
        names: What gates and patches refer to; None only where there are none.

    Raises:
        WeirError: Naming the field.
    """
    extra_args = dict(request.extra_args)
    if fork := fork_fields(body):
        extra_args[WIRE_KEY], origins = _with_fork(extra_args.get(WIRE_KEY), fork, names)
        request = replace(request, extra_args=extra_args, own=True, origins=origins)
    if LENS_CAPTURE_KEY not in extra_args:
        return request
    value = extra_args[LENS_CAPTURE_KEY]
    if isinstance(value, (int, float)):  # in ``vllm_xargs`` vLLM turns its true into a number
        if value not in (0, 1):
            raise WeirError("expected true, a list of blocks, or that as JSON", LENS_CAPTURE_KEY)
        extra_args[LENS_CAPTURE_KEY] = value == 1
    return replace(request, extra_args=extra_args, answer=activations_field)


def _with_fork(
    weir_object: Mapping[str, Any] | None, fields: Mapping[str, Any], names: KnownNames | None
) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Return a wire form that also does what the fork's fields ask, and `WeirRequest.origins`.

    The fork's module comes first, then its tiers, its gates, its patches, and the request's own interventions.
    """
    out: dict[str, Any] = dict(weir_object or {"v": WIRE_VERSION})
    origins: dict[str, tuple[str, ...]] = {}
    name = fields.get(NAME)
    if name is not None:
        if not isinstance(name, str):
            raise WeirError("expected the name of a module, a string", NAME)
        out["modules"] = [name, *_as_list(out.get("modules"))]
        origins["modules"] = (NAME,)
    found: dict[str, list[Any]] = {"interventions": [*from_tiers(**{key: fields.get(key) for key in TIERS})]}
    gates, patch, table = (fields.get(key) for key in FORK_LISTS)
    assert names is not None or (gates is None and patch is None and table is None)
    if names is not None and gates is not None:
        found["probes"], gated = from_gates(gates, names)
        found["interventions"] += gated
    if names is not None and (patch is not None or table is not None):
        found["interventions"] += from_patch([] if patch is None else patch, parse_table(table), names)
    for key, ours in found.items():
        if ours:
            out[key] = [*(one.to_json() for one in ours), *_as_list(out.get(key))]
            origins[key] = tuple(one.path for one in ours)
    return out, origins


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def activations_field(acts: Activations, max_bytes: int) -> dict[str, Any]:
    """Return vllm-lens's field ``activations`` of a response; nothing if its key captured nothing.

    Raises:
        WeirError: If the rows have more than `max_bytes` bytes.
    """
    if LENS_KEY not in acts:
        return {}
    rows = acts[LENS_KEY]
    if rows.nbytes > max_bytes:
        raise WeirError(
            f"{rows.nbytes} bytes of rows exceed the {max_bytes} that a response may carry (WEIR_SERVE_LENS_BYTES); "
            "ask for fewer blocks or tokens, or use the key weir, whose rows are fetched by reference",
            LENS_CAPTURE_KEY,
        )
    return {"activations": {LENS_KEY: serialize_tensor(rows)}}
