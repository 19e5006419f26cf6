"""Consumers: plugins that get the rows of finished requests.

They are found in the entry-point group ``vllm_weir.consumers``.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
from collections.abc import Mapping
from typing import Any

from vllm_weir.consumers.base import Consumer, EngineInfo, Finished, Rows
from vllm_weir.errors import WeirError

__all__ = ["GROUP", "Consumer", "EngineInfo", "Finished", "Rows", "make", "names"]
GROUP = "vllm_weir.consumers"
_SHIPPED = {
    "filesystem": "vllm_weir.consumers.filesystem:Filesystem",
    "logging": "vllm_weir.consumers.norms:Norms",
    "npz": "vllm_weir.consumers.filesystem:Npz",
}
"""Weir's own consumers, which a checkout that is not installed has too."""
logger = logging.getLogger(__name__)


def names() -> dict[str, str]:
    """Return the installed consumers: name -> ``module:class``.

    Of several that share a name, Weir's own or else the first is used; a warning, once, names the
    others.
    """
    installed = dict(_SHIPPED)
    for entry in importlib.metadata.entry_points(group=GROUP):
        used = installed.setdefault(entry.name, entry.value)
        if used != entry.value:
            _warn_unused(entry.name, entry.dist.name if entry.dist else "some package", entry.value, used)
    return installed


@functools.cache
def _warn_unused(name: str, package: str, value: str, used: str) -> None:
    logger.warning("the consumer %r of %s (%s) is not used, as %s has the same name", name, package, value, used)


def find(name: str, path: str) -> type[Consumer]:
    """Return a consumer's class.

    Raises:
        WeirError: naming the field `path`, if the consumer is not installed or cannot be imported.
    """
    installed = names()
    if name not in installed:
        raise WeirError(f"no consumer {name!r} is installed; there are {', '.join(sorted(installed))}", path)
    entry = importlib.metadata.EntryPoint(name, installed[name], GROUP)
    try:
        loaded = entry.load()
    except Exception as e:
        raise WeirError(
            f"the consumer {name!r} ({installed[name]}) cannot be imported: {type(e).__name__}: {e}", path
        ) from e
    if not (isinstance(loaded, type) and issubclass(loaded, Consumer)):
        raise WeirError(f"{installed[name]} is not a subclass of vllm_weir.consumers.Consumer", path)
    return loaded


def make(name: str, options: Mapping[str, Any], path: str) -> Consumer:
    """Make a consumer with its options.

    Raises:
        WeirError: naming the field under `path`, if the consumer cannot be found or refuses the
            options.
    """
    consumer_class = find(name, path)
    try:
        return consumer_class(**options)
    except WeirError as e:
        raise WeirError(e.message, f"{path}.{name}.{e.field}" if e.field else f"{path}.{name}") from None
    except Exception as e:
        raise WeirError(f"the consumer cannot be set up: {type(e).__name__}: {e}", f"{path}.{name}") from e
