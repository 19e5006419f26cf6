"""Controllers: plugins that act on what probes say.

An `AsyncController` gets the scores of finished requests and changes what later requests undergo.
They are found in the entry-point group ``vllm_weir.controllers``, or named ``module:class``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_weir.consumers.base import EngineInfo, Finished, Rows
from vllm_weir.controllers.async_controller import Actions, AsyncController
from vllm_weir.errors import WeirError
from vllm_weir.util.plugins import PluginGroup

__all__ = ["GROUP", "Actions", "AsyncController", "EngineInfo", "Finished", "Rows", "find", "make", "names"]
GROUP = "vllm_weir.controllers"
_PLUGINS = PluginGroup(GROUP, "controller")


def names() -> dict[str, str]:
    """Return the installed controllers: name -> ``module:class``, see `PluginGroup.names`."""
    return _PLUGINS.names()


def find(name: str, path: str) -> type[AsyncController]:
    """Return a controller's class, by its name or ``module:class``.

    Raises:
        WeirError: naming the field `path`, if it is not installed or cannot be imported.
    """
    loaded = _PLUGINS.load(name, path)
    if not (isinstance(loaded, type) and issubclass(loaded, AsyncController)):
        raise WeirError(f"{names().get(name, name)} is not a subclass of vllm_weir.controllers.AsyncController", path)
    return loaded


def make(name: str, options: Mapping[str, Any], path: str) -> AsyncController:
    """Make a controller with its options.

    Raises:
        WeirError: naming the field under `path`, if it cannot be found or refuses the options.
    """
    controller: AsyncController = _PLUGINS.make(find(name, path), name, options, path)
    return controller
