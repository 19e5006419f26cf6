"""Controllers as an engine's settings name them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.json_text import loads
from vllm_weir.schema.sinks import SinkDefinition, parse_name

PREFIX = "controller:"
"""Comes before a controller's name where probes and sinks have theirs."""
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def parse_controllers(data: object, path: str = "settings.controllers") -> dict[str, SinkDefinition]:
    """Parse name -> ``{controller: options}``, given as a mapping or the same as JSON text.

    A controller is an entry point of the group ``vllm_weir.controllers``, or ``module:class``. The
    other keys are those of a sink, but for ``"keep"``.
    """
    if isinstance(data, str):
        data = loads(data, path)
    if not isinstance(data, Mapping):
        raise WeirError(f"expected an object, got {type(data).__name__}", path)
    out = {}
    for name, given in data.items():
        at = f"{path}.{brief(name)}"
        definition = out[parse_name(name, path, "controller")] = SinkDefinition.parse(given, at, plugin=_parse_class)
        if definition.keep != "always":
            raise WeirError("a controller gets every sequence; leave keep out", f"{at}.keep")
    return out


def _parse_class(name: object, path: str) -> str:
    """Parse the name of an installed controller, or ``module:class``."""
    if isinstance(name, str) and _CLASS.fullmatch(name):
        return name
    return parse_name(name, path, "controller")
