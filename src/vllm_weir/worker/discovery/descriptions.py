"""Hand-written descriptions of models whose structure does not tell where a hook point is.

A description is a mapping ``{"stack": path, "points": {hook point: place}}``, both keys optional.
`stack` is the path of the list of blocks. A place is relative to the block:

* ``"self_attn:out"``: what the module returns; ``"self_attn:out:1"``: element 1 of it.
* ``"ln_2:in:hidden_states"``: an argument of the module, by name or position.
* ``"ln_2:in:x+residual"``: the sum of two arguments; ``"ln_2:in:0+1"`` by position.

Described points are verified at load like all others. A package can describe its models in entry
points of the group ``vllm_weir.models``, each named after the model's class.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.hooks import INNER_HOOKS
from vllm_weir.worker.discovery.anchors import Anchor
from vllm_weir.worker.discovery.block_points import BlockPoints
from vllm_weir.worker.discovery.matcher import Matcher
from vllm_weir.worker.discovery.stream_ports import StreamPorts
from vllm_weir.worker.discovery.trace import ModuleCall, value_at

GROUP = "vllm_weir.models"


@dataclass(frozen=True)
class ModelDescription:
    """A parsed description; empty for a model that has none."""

    stack: str = ""  # path of the list of blocks; "" if it is to be found
    points: Mapping[str, str] = field(default_factory=dict)  # hook point inside the block -> place

    @classmethod
    def parse(cls, data: object, field_path: str) -> ModelDescription:
        """Parse a JSON-like object; raise WeirError that names the bad part, below `field_path` of the settings."""
        if not isinstance(data, Mapping):
            raise WeirError(f"a description is an object with 'stack' and 'points', got {brief(data)}", field_path)
        for key in data:
            if key not in ("stack", "points"):
                raise WeirError("unknown key; a description has 'stack' and 'points'", f"{field_path}.{brief(key)}")
        stack, points = data.get("stack") or "", data.get("points") or {}
        if not isinstance(stack, str) or not isinstance(points, Mapping):
            raise WeirError("'stack' must be a path and 'points' an object", field_path)
        for hook, place in points.items():
            if hook not in INNER_HOOKS:
                known = ", ".join(INNER_HOOKS)
                raise WeirError(f"only {known} can be described", f"{field_path}.points.{brief(hook)}")
            _split(place, f"{field_path}.points.{hook}")
        return cls(stack, dict(points))

    def anchor(self, hook: str, calls: Sequence[ModuleCall]) -> Anchor | None:
        """Return where `hook` is in a block, whose own call is the first of `calls`; None if it is not there."""
        if hook not in self.points:
            return None
        module, when, names = _split(self.points[hook], f"points.{hook}")
        path = f"{calls[0].path}.{module}" if module else calls[0].path
        call = next((c for c in calls if c.path == path), None)
        if call is None:
            return None
        if when == "out":
            index = int(names[0]) if names else 0
            key = next((k for k in call.outputs if max(k.index, 0) == index), None)
            return None if key is None else Anchor(path, "after", key)
        keys = [next((k for k in call.args if name in (k.name, str(k.index))), None) for name in names]
        if None in keys or keys[0] is None:
            return None
        return Anchor(path, "before", keys[0], keys[1] if len(keys) > 1 else None)


def description_of(model_class: str, setting: Mapping[str, Any] | None) -> ModelDescription:
    """Return a model class's description, from the setting or an installed package, else an empty one."""
    if setting:
        return ModelDescription.parse(setting, "settings.describe")
    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.name == model_class:
            return ModelDescription.parse(entry.load(), f"{GROUP}:{entry.name}")
    return ModelDescription()


def resolve_described_block(
    description: ModelDescription, calls: Sequence[ModuleCall], ports: StreamPorts, matcher: Matcher
) -> BlockPoints:
    """Return the points that a description names in a block, if an equation holds for them."""
    points = BlockPoints(kind="described")
    for hook in INNER_HOOKS:
        anchor = description.anchor(hook, calls)
        if anchor is None:
            points.refused[hook] = "the model's description does not name it, or names what this block does not have"
        else:
            points.anchors[hook] = anchor
    if not _adds_up(points.anchors, calls, ports, matcher):
        return BlockPoints.none("what the model's description names does not add up")
    return points


def _adds_up(anchors: Mapping[str, Anchor], calls: Sequence[ModuleCall], ports: StreamPorts, matcher: Matcher) -> bool:
    """Return whether one of the block's equations holds between these points."""
    pre, post = ports.stream_through(calls[0])
    if pre is None or post is None:
        return False
    values = {hook: value_at(calls, anchor) for hook, anchor in anchors.items()}
    attn_out, mid, mlp_out = (values.get(hook) for hook in ("attn_out", "resid_mid", "mlp_out"))
    if mid is not None:
        return (attn_out is not None and matcher.same(pre + attn_out, mid)) or (
            mlp_out is not None and matcher.same(mid + mlp_out, post)
        )
    return matcher.same(pre + sum(term for term in (attn_out, mlp_out) if term is not None), post)


def _split(place: object, field_path: str) -> tuple[str, str, list[str]]:
    """Return the module, "in" or "out", and the argument names or output index of a place."""
    parts = place.split(":") if isinstance(place, str) else []
    if len(parts) in (2, 3) and parts[1] == "out" and (len(parts) == 2 or parts[2].isdigit()):
        return parts[0], "out", parts[2:]
    if len(parts) == 3 and parts[1] == "in":
        names = parts[2].split("+")
        if 1 <= len(names) <= 2 and all(name.isidentifier() or name.isdigit() for name in names):
            return parts[0], "in", names
    raise WeirError(
        f"{brief(place)!r} is no place; write 'module:out', 'module:out:1' or 'module:in:argument'", field_path
    )
