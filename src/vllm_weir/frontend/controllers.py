"""The controllers of an engine: how they are set up, and what they may change."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from typing import Any

from vllm_weir import controllers
from vllm_weir.controllers.async_controller import AsyncController
from vllm_weir.errors import WeirError
from vllm_weir.frontend.engine_frontend import EngineFrontend
from vllm_weir.frontend.engine_names import EngineNames
from vllm_weir.frontend.sinks.manager import captures_for
from vllm_weir.schema.gates import PREFIX, parse_controllers
from vllm_weir.schema.probes import parse_probes
from vllm_weir.schema.request import parse_interventions
from vllm_weir.schema.sinks import SinkDefinition
from vllm_weir.worker.scoring.step_controllers import SyncController


def check_controllers(definitions: Mapping[str, SinkDefinition]) -> None:
    """Raise WeirError for controllers of the settings that are wrong whatever the engine."""
    for name, definition in definitions.items():
        path = f"settings.controllers.{name}"
        found = controllers.find(definition.consumer, path)
        if issubclass(found, AsyncController):
            captures_for(name, definition, found, path)
        elif definition != SinkDefinition(definition.consumer, definition.options):
            raise WeirError("a sync controller has no queue and no captures; give its options alone", path)


def set_up(frontend: EngineFrontend, definitions: Mapping[str, SinkDefinition]) -> None:
    """Make the controllers of an engine's settings; raise WeirError naming the setting, if one cannot be made."""
    for name, definition in definitions.items():
        path = f"settings.controllers.{name}"
        controller = controllers.make(definition.consumer, json.loads(definition.options), path)
        if isinstance(controller, AsyncController):
            add(frontend, name, definition, controller, path)
            continue
        probes = parse_probes(list(controller.probes), f"{path}.probes")
        if not probes:
            raise WeirError("a sync controller reads at least one probe; name some in its attribute probes", path)
        frontend.names.probes.controllers[name] = probes


def add_object(frontend: EngineFrontend, name: str, controller: object, options: Mapping[str, Any]) -> None:
    """Add a controller that is given in Python, see `vllm_weir.add_controller`.

    Raise WeirError naming the field that is wrong; then nothing changes.
    """
    if not isinstance(controller, AsyncController):
        sync = isinstance(controller, SyncController)
        sync = sync or (isinstance(controller, type) and issubclass(controller, SyncController))
        if sync:
            raise WeirError(
                "each worker makes a sync controller of its own: name its class in the setting controllers, as "
                "'module:class' if it is not installed as a plugin",
                "controller",
            )
        what = controller.__name__ if isinstance(controller, type) else type(controller).__name__
        raise WeirError(f"expected an object of a subclass of AsyncController, got {what}", "controller")
    (definition,) = parse_controllers({name: {type(controller).__name__: {}, **options}}, "controllers").values()
    add(frontend, name, definition, controller, "controller")


def add(
    frontend: EngineFrontend, name: str, definition: SinkDefinition, controller: AsyncController, path: str
) -> None:
    """Let a controller, not opened yet, act in an engine; `path` is the field that set it up, for errors.

    Raise WeirError if the name is taken, its probes or captures cannot be served, or it cannot be opened; then nothing
    changes.
    """
    if frontend.manager.controller(f"{PREFIX}{name}") is not None:
        raise WeirError(f"there is a controller {name!r} already; choose another name", "name")
    probes = parse_probes(list(controller.probes), f"{path}.probes")
    controller.actions = FrontendActions(frontend)
    frontend.add_controller(f"{PREFIX}{name}", definition, controller, probes, path)


def remove(frontend: EngineFrontend, name: str) -> None:
    """Remove a controller and the probes that it has declared, see `vllm_weir.remove_controller`.

    Raise WeirError if there is none of the name, or interventions of every request are gated by one of its probes;
    then nothing changes.
    """
    controller = frontend.manager.controller(f"{PREFIX}{name}")
    if controller is None:
        raise WeirError(f"there is no controller {name!r}", "name")
    probes = parse_probes(list(controller.probes), "controller.probes")
    frontend.names.change_probes({probe.name: None for probe in probes if not isinstance(probe, str)})
    frontend.remove_controller(f"{PREFIX}{name}")


class FrontendActions:
    """Changes what requests to an engine undergo, see `vllm_weir.controllers.Actions`.

    Args:
        frontend: of the engine; it is not kept alive.
    """

    def __init__(self, frontend: EngineFrontend) -> None:
        self._frontend_of = weakref.ref(frontend)

    def set_vector(self, name: str, vector: Any) -> str:
        return self._names().put_vector(name, vector)

    def remove_vector(self, name: str) -> None:
        self._names().remove_vector(name)

    def set_global(self, interventions: Any) -> None:
        self._names().set_always(parse_interventions(interventions, "interventions"))

    def clear_global(self) -> None:
        self._names().set_always(())

    def _names(self) -> EngineNames:
        frontend = self._frontend_of()
        if frontend is None:
            raise WeirError("the engine has been closed", "actions")
        return frontend.names
