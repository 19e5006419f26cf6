"""What other systems ask over HTTP, translated into Weir's form, and what they are answered."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_weir.compat.rhizonymph.requests import KnownNames, from_gates, from_patch, parse_table
from vllm_weir.compat.rhizonymph.tiers import from_tiers
from vllm_weir.compat.vllm_lens.request import is_binary
from vllm_weir.compat.vllm_lens.tensors import serialize_activations, zstd_frame
from vllm_weir.errors import WeirError
from vllm_weir.results.activations import Activations
from vllm_weir.schema.keys import (
    FORK_LISTS,
    LENS_CAPTURE_KEY,
    LENS_QK_KEY,
    LENS_TRANSPORT_KEY,
    WIRE_KEY,
    fork_fields,
)
from vllm_weir.schema.keys import FORK_NAME as NAME
from vllm_weir.schema.keys import FORK_TIERS as TIERS
from vllm_weir.schema.request import WIRE_VERSION
from vllm_weir.server.limits import ServerLimits
from vllm_weir.server.request import WeirRequest
from vllm_weir.server.shared.result_files import frame_key
from vllm_weir.server.state import ServerState


async def known_names(state: ServerState) -> KnownNames:
    """Return what the fork's gates and patches may refer to; raise WeirError if the engine serves none of it."""
    capabilities = await state.capabilities()
    state.frontend.names.refresh()
    return KnownNames(state.frontend.names.vectors.module, capabilities.d_model)


def translate(
    request: WeirRequest, body: Mapping[str, Any], names: KnownNames | None = None, routes: bool = True
) -> WeirRequest:
    """Return the request with what a body asks in fields of other systems.

    Args:
        request: What it asks in Weir's.
        body: The fields that vLLM does not know.
        names: What gates and patches refer to; None only where there are none.
        routes: Whether this server has a route to fetch results from.
    """
    extra_args = dict(request.extra_args)
    if fork := fork_fields(body):
        extra_args[WIRE_KEY], origins = _with_fork(extra_args.get(WIRE_KEY), fork, names)
        request = replace(request, extra_args=extra_args, own=True, origins=origins)
    binary = is_binary(extra_args.pop(LENS_TRANSPORT_KEY, None))
    if binary and not routes:
        raise WeirError(
            "this server has none of Weir's routes to fetch them from; start it with `weir serve`, or leave it out",
            LENS_TRANSPORT_KEY,
        )
    captures = [key for key in (LENS_CAPTURE_KEY, LENS_QK_KEY) if key in extra_args]
    for key in captures:
        value = extra_args[key]
        if isinstance(value, (int, float)):  # in ``vllm_xargs`` vLLM turns its true into a number
            if value not in (0, 1):
                raise WeirError("expected true, a list of blocks, or that as JSON", key)
            extra_args[key] = value == 1
    answer = functools.partial(activations_field, binary=binary) if captures else None
    return replace(request, extra_args=extra_args, answer=answer)


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


def activations_field(
    acts: Activations, limits: ServerLimits, binary: bool = False
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return vllm-lens's field ``activations`` of a response; nothing if its keys captured nothing.

    `acts`: what was captured; `limits`: how many bytes of rows there may be; `binary`: whether tensors are to be
    fetched. Returns the field by its name, and what is to be stored for it to be fetched: a zstd frame by its key.
    """
    tensors = {name: acts[name] for name in acts.stacked.tensors()}
    key = LENS_CAPTURE_KEY if acts.stacked.stream else LENS_QK_KEY
    size = sum(tensor.nbytes for tensor in tensors.values())
    if binary and size > limits.spool_bytes:
        raise WeirError(
            f"{size} bytes of rows exceed the {limits.spool_bytes} that the server keeps (WEIR_SERVE_SPOOL_BYTES); ask "
            "for fewer blocks or tokens",
            key,
        )
    if not binary and size > limits.lens_bytes:
        raise WeirError(
            f"{size} bytes of rows exceed the {limits.lens_bytes} that a response may carry (WEIR_SERVE_LENS_BYTES); "
            "ask for fewer blocks or tokens, for activations_transport='binary', or use the key weir, whose rows are "
            "fetched by reference",
            key,
        )
    if not tensors:
        return {}, {}
    values = serialize_activations(acts.stacked.values())
    if not binary:
        return {"activations": serialize_activations(tensors) | values}, {}
    entries: dict[str, Any] = {}
    frames: dict[str, bytes] = {}
    for name, tensor in tensors.items():
        frame, described = zstd_frame(tensor)
        handle = frame_key(tensor)
        frames[handle] = frame
        entries[name] = {"handle": handle, "nbytes": len(frame), "transport": "binary", **described}
    return {"activations": entries | values}, frames
