"""Request fields of the fork RhizoNymph/vllm as Weir's own wire form. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.schema.compat.three_tier import from_tiers
from vllm_weir.schema.keys import FORK_NAME as NAME
from vllm_weir.schema.keys import FORK_TIERS as TIERS
from vllm_weir.schema.request import WIRE_VERSION


def with_fork(
    weir_object: Mapping[str, Any] | None, fields: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """A wire form (or None) that does what the fork's fields say, too: its module first, then its tiers, then the rest.

    Returns:
        It, and for its lists ``modules`` and ``interventions`` the fields that their first entries came from.

    Raises:
        WeirError: naming the field.
    """
    out: dict[str, Any] = dict(weir_object or {"v": WIRE_VERSION})
    first: dict[str, tuple[str, ...]] = {}
    name = fields.get(NAME)
    if name is not None:
        if not isinstance(name, str):
            raise WeirError("the name of a module is a string", NAME)
        out["modules"] = [name, *_several(out.get("modules"))]
        first["modules"] = (NAME,)
    tiers = from_tiers(**{key: fields.get(key) for key in TIERS})
    if tiers:
        out["interventions"] = [*(one.to_json() for one in tiers), *_several(out.get("interventions"))]
        first["interventions"] = tuple(one.path for one in tiers)
    return out, first


def _several(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
