"""Request fields of the fork RhizoNymph/vllm, translated into Weir's wire form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.schema.compat.fork_requests import KnownNames, from_gates, from_patch, parse_table
from vllm_weir.schema.compat.three_tier import from_tiers
from vllm_weir.schema.keys import FORK_LISTS
from vllm_weir.schema.keys import FORK_NAME as NAME
from vllm_weir.schema.keys import FORK_TIERS as TIERS
from vllm_weir.schema.request import WIRE_VERSION


def with_fork(
    weir_object: Mapping[str, Any] | None, fields: Mapping[str, Any], names: KnownNames | None = None
) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Return a wire form that also does what the fork's fields ask.

    The fork's module comes first, then its tiers, its gates, its patches, and the request's own interventions.

    Args:
        weir_object: The request's own wire form, or None.
        fields: The fork's fields of the request.
        names: What gates and patches refer to; None only where there are none.

    Returns:
        The wire form; and, for its lists ``modules``, ``probes`` and ``interventions``, the fork's
        fields that their first entries stand for.

    Raises:
        WeirError: Naming the field.
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
