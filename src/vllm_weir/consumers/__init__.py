"""Consumers: plugins that get the rows of finished requests. Entry-point group ``vllm_weir.consumers``."""

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
"""Weir's own, which are there where its entry points are not: in a checkout that was not installed."""
logger = logging.getLogger(__name__)


def names() -> dict[str, str]:
    """Consumers that are installed: name -> ``module:class``. Weir's own names stand for Weir's own; of others that
    share one the first found counts. What is left out is named in a warning, once."""
    out = dict(_SHIPPED)
    for entry in importlib.metadata.entry_points(group=GROUP):
        used = out.setdefault(entry.name, entry.value)
        if used != entry.value:
            _warn(entry.name, entry.dist.name if entry.dist else "some package", entry.value, used)
    return out


@functools.cache
def _warn(name: str, package: str, value: str, used: str) -> None:
    logger.warning("the consumer %r of %s (%s) is not used: %s has that name already", name, package, value, used)


def find(name: str, path: str) -> type[Consumer]:
    """A consumer's class; raises WeirError if it is not installed or cannot be imported."""
    known = names()
    if name not in known:
        raise WeirError(f"no consumer {name!r} is installed; there are {', '.join(sorted(known))}", path)
    entry = importlib.metadata.EntryPoint(name, known[name], GROUP)
    try:
        found = entry.load()
    except Exception as e:
        raise WeirError(
            f"the consumer {name!r} ({known[name]}) cannot be imported: {type(e).__name__}: {e}", path
        ) from e
    if not (isinstance(found, type) and issubclass(found, Consumer)):
        raise WeirError(f"{known[name]} is no vllm_weir.consumers.Consumer", path)
    return found


def make(name: str, options: Mapping[str, Any], path: str) -> Consumer:
    """A consumer with its options; raises WeirError if it takes no such options."""
    kind = find(name, path)
    try:
        return kind(**options)
    except WeirError as e:
        raise WeirError(e.message, f"{path}.{name}.{e.field}" if e.field else f"{path}.{name}") from None
    except Exception as e:
        raise WeirError(f"it cannot be set up: {type(e).__name__}: {e}", f"{path}.{name}") from e
