"""Descriptions of models whose structure does not tell where a hook point is, written down by hand.

A description is a mapping ``{"stack": path, "points": {hook point: place}}``, both parts optional. `stack` is the
path of the list of blocks. A place is relative to the block: ``"self_attn:out"`` (what the module returns),
``"self_attn:out:1"`` (element 1 of it), ``"ln_2:in:hidden_states"`` (an argument of it), or
``"ln_2:in:x+residual"`` (two, whose sum the point is; ``"ln_2:in:0+1"`` by place). What is described is proven at load
like what is found.

A package can describe its models in entry points of the group ``vllm_weir.models``, named after the model's class.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.hooks import INNER_HOOKS
from vllm_weir.worker.discovery.anchors import Anchor
from vllm_weir.worker.discovery.recorder import ModuleCall

GROUP = "vllm_weir.models"


@dataclass(frozen=True)
class ModelDescription:
    """A parsed description; see the module."""

    stack: str = ""
    points: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, data: object, path: str) -> ModelDescription:
        """Raises WeirError naming the bad part."""
        if not isinstance(data, Mapping):
            raise WeirError(f"a description is an object with 'stack' and 'points', got {brief(data)}", path)
        for key in data:
            if key not in ("stack", "points"):
                raise WeirError("unknown key; known are stack, points", f"{path}.{brief(key)}")
        stack, points = data.get("stack") or "", data.get("points") or {}
        if not isinstance(stack, str) or not isinstance(points, Mapping):
            raise WeirError("stack is a path and points an object", path)
        for hook, place in points.items():
            if hook not in INNER_HOOKS:
                raise WeirError(f"only {', '.join(INNER_HOOKS)} can be described", f"{path}.points.{brief(hook)}")
            _split(place, f"{path}.points.{hook}")
        return cls(stack, dict(points))

    def anchor(self, hook: str, block: str, calls: Sequence[ModuleCall]) -> Anchor | None:
        """Where `hook` is in the block of path `block`; None if none of the block's calls is what is described."""
        if hook not in self.points:
            return None
        module, when, names = _split(self.points[hook], f"points.{hook}")
        path = f"{block}.{module}" if module else block
        call = next((c for c in calls if c.path == path), None)
        if call is None:
            return None
        if when == "out":
            wanted = int(names[0]) if names else 0
            key = next((k for k in call.out if max(k.index, 0) == wanted), None)
            return None if key is None else Anchor(path, "after", key)
        keys = [next((k for k in call.args if n in (k.name, str(k.index))), None) for n in names]
        if None in keys or keys[0] is None:
            return None
        return Anchor(path, "before", keys[0], keys[1] if len(keys) > 1 else None)


def described(model_class: str, setting: Mapping[str, Any] | None) -> ModelDescription:
    """The description of a model class: the setting's, an installed package's, or an empty one."""
    if setting:
        return ModelDescription.parse(setting, "settings.describe")
    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.name == model_class:
            return ModelDescription.parse(entry.load(), f"{GROUP}:{entry.name}")
    return ModelDescription()


def _split(place: object, path: str) -> tuple[str, str, list[str]]:
    parts = place.split(":") if isinstance(place, str) else []
    if len(parts) in (2, 3) and parts[1] == "out" and (len(parts) == 2 or parts[2].isdigit()):
        return parts[0], "out", parts[2:]
    if len(parts) == 3 and parts[1] == "in":
        names = parts[2].split("+")
        if 1 <= len(names) <= 2 and all(n.isidentifier() or n.isdigit() for n in names):
            return parts[0], "in", names
    raise WeirError(f"{brief(place)!r} is no place; write 'module:out', 'module:out:1' or 'module:in:argument'", path)
