"""Consumers: plugins that get the rows of finished requests.

They are found in the entry-point group ``vllm_weir.consumers``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_weir.consumers.base import Consumer, EngineInfo, Finished, Rows
from vllm_weir.errors import WeirError
from vllm_weir.util.plugins import PluginGroup

__all__ = ["GROUP", "Consumer", "EngineInfo", "Finished", "Rows", "make", "names"]
GROUP = "vllm_weir.consumers"
_SHIPPED = {
    "filesystem": "vllm_weir.storage.consumer:Filesystem",
    "logging": "vllm_weir.consumers.norms:Norms",
    "npz": "vllm_weir.storage.consumer:Npz",
    "stream": "vllm_weir.streaming.consumer:Stream",
}
_PLUGINS = PluginGroup(GROUP, "consumer", _SHIPPED)


def names() -> dict[str, str]:
    """Return the installed consumers: name -> ``module:class``, see `PluginGroup.names`."""
    return _PLUGINS.names()


def find(name: str, path: str) -> type[Consumer]:
    """Return a consumer's class."""
    loaded = _PLUGINS.load(name, path)
    if not (isinstance(loaded, type) and issubclass(loaded, Consumer)):
        raise WeirError(f"{names().get(name, name)} is not a subclass of vllm_weir.consumers.Consumer", path)
    return loaded


def make(name: str, options: Mapping[str, Any], path: str) -> Consumer:
    """Make a consumer with its options."""
    consumer: Consumer = _PLUGINS.make(find(name, path), name, options, path)
    return consumer
