"""Controllers: plugins that act on what probes say.

An `AsyncController` gets the scores of finished requests and changes what later requests undergo. A
`SyncController` gets each step's scores on the device and decides on interventions in the next step.
They are found in the entry-point group ``vllm_weir.controllers``, or named ``module:class``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from vllm_weir.consumers.base import EngineInfo, Finished, Rows
from vllm_weir.controllers.async_controller import Actions, AsyncController
from vllm_weir.errors import WeirError
from vllm_weir.schema.sinks import SinkDefinition
from vllm_weir.util.plugins import PluginGroup
from vllm_weir.worker.scoring.step_controllers import ScoredStep, SyncController, WorkerInfo

__all__ = [
    "GROUP",
    "Actions",
    "AsyncController",
    "EngineInfo",
    "Finished",
    "Rows",
    "ScoredStep",
    "SyncController",
    "WorkerInfo",
    "find",
    "make",
    "names",
]
GROUP = "vllm_weir.controllers"
_PLUGINS = PluginGroup(GROUP, "controller")


def make_sync(definitions: Mapping[str, SinkDefinition]) -> dict[str, SyncController]:
    """Make the sync controllers among an engine's controllers, by name."""
    out = {}
    for name, definition in definitions.items():
        path = f"settings.controllers.{name}"
        if issubclass(find(definition.consumer, path), SyncController):
            out[name] = cast("SyncController", make(definition.consumer, json.loads(definition.options), path))
    return out


def names() -> dict[str, str]:
    """Return the installed controllers: name -> ``module:class``, see `PluginGroup.names`."""
    return _PLUGINS.names()


def find(name: str, path: str) -> type[AsyncController] | type[SyncController]:
    """Return a controller's class, by its name or ``module:class``."""
    loaded = _PLUGINS.load(name, path)
    if not (isinstance(loaded, type) and issubclass(loaded, (AsyncController, SyncController))):
        raise WeirError(
            f"{names().get(name, name)} is no subclass of vllm_weir.controllers.AsyncController or SyncController", path
        )
    return loaded


def make(name: str, options: Mapping[str, Any], path: str) -> AsyncController | SyncController:
    """Make a controller with its options."""
    controller: AsyncController | SyncController = _PLUGINS.make(find(name, path), name, options, path)
    return controller
