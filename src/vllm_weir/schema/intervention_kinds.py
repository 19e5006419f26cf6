"""The kinds of interventions, and how their wire forms are parsed."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.features import Reconstruct, SetFeature
from vllm_weir.schema.fields import refuse_unknown_keys
from vllm_weir.schema.functions import Travelling
from vllm_weir.schema.intervention_base import Intervention
from vllm_weir.schema.interventions import Ablate, Add, Clamp, LowRank, Replace
from vllm_weir.schema.named_hooks import Use
from vllm_weir.schema.set_activation import Reconstruction, SetActivation
from vllm_weir.schema.user_hooks import Hook

OfAutoencoder = SetFeature | Reconstruct
AnyIntervention = Intervention | OfAutoencoder | Use
"""What a request may hold; admission makes an `Intervention` of what names an autoencoder, and of a `Use`."""
KINDS: dict[str, type[Intervention]] = {kind.op: kind for kind in (Add, Ablate, Clamp, Replace, LowRank, Hook)}
Kept = Intervention | Use
"""What a server keeps under names and for all requests; each of its processes looks hooks up when a request comes."""
STORED_KINDS: dict[str, type[Intervention]] = KINDS | {kind.op: kind for kind in (SetActivation, Reconstruction)}
"""With those that no request may hold."""


def parse_intervention(data: object, path: str) -> AnyIntervention:
    """Parse the wire form of an intervention, or return the intervention that is given.

    Raises:
        WeirError: naming the field; unknown keys are refused.
    """
    if isinstance(data, AnyIntervention):
        return data
    for kind in (SetFeature, Reconstruct):
        if isinstance(data, Mapping) and data.get("op") == kind.op:
            return kind.from_json(data, path)
    if isinstance(data, Mapping) and data.get("op") == Use.op and not _is_function(data.get("function")):
        return Use.from_json(data, path)
    return _parse(data, path, KINDS, f"{', '.join(KINDS)}, {SetFeature.op}, {Reconstruct.op}")


def _is_function(value: object) -> bool:
    """Return whether this is of the user's own process: JSON has no such thing."""
    return isinstance(value, Travelling) or callable(value)


def parse_stored(data: object, path: str) -> Kept:
    """Parse the wire form of an intervention that a server has stored."""
    if isinstance(data, Mapping) and data.get("op") == Use.op:
        return Use.from_json(data, path)
    return _parse(data, path, STORED_KINDS, ", ".join(STORED_KINDS))


def _parse(data: object, path: str, kinds: Mapping[str, type[Intervention]], known_ops: str) -> Intervention:
    if not isinstance(data, Mapping):
        raise WeirError(f"an intervention is an object, got {type(data).__name__}", path)
    kind = kinds.get(data["op"]) if isinstance(data.get("op"), str) else None
    if kind is None:
        raise WeirError(f"unknown op {brief(data.get('op'))!r}; choose from {known_ops}", f"{path}.op")
    known = sorted({*kind.own_fields(), "layers", "hook", "positions"})
    values = {key: value for key, value in data.items() if key != "op"}
    refuse_unknown_keys(values, known, path, f"{kind.op} knows {', '.join(known)}")
    for name in kind.vectors:
        if name not in data:
            raise WeirError("missing", f"{path}.{name}")
    return kind(**values, path=path)  # type: ignore[call-arg]
