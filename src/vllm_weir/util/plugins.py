"""Plugins by name: the entry points of a group, beside those that Weir ships."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from vllm_weir.errors import WeirError

logger = logging.getLogger(__name__)


class PluginGroup:
    """The plugins of an entry-point group.

    `kind`: what a plugin of it is called in messages. `shipped`: Weir's own, name -> ``module:class``; a checkout that
    is not installed has them too.
    """

    def __init__(self, group: str, kind: str, shipped: Mapping[str, str] = MappingProxyType({})) -> None:
        self.group, self.kind = group, kind
        self._shipped = shipped

    def names(self) -> dict[str, str]:
        """Return the installed plugins: name -> ``module:class``.

        Of several that share a name, Weir's own or else the first is used; a warning, once, names
        the others.
        """
        installed = dict(self._shipped)
        for entry in importlib.metadata.entry_points(group=self.group):
            used = installed.setdefault(entry.name, entry.value)
            if used != entry.value:
                warn_unused(self.kind, entry.name, entry.dist.name if entry.dist else "some package", entry.value, used)
        return installed

    def load(self, name: str, path: str) -> Any:
        """Return what a name, or ``module:class``, stands for.

        Raise WeirError naming the field `path`, if it is not installed or cannot be imported.
        """
        value = name
        if ":" not in name:
            installed = self.names()
            if name not in installed:
                there_are = f"there are {', '.join(sorted(installed))}" if installed else "none is"
                raise WeirError(f"no {self.kind} {name!r} is installed; {there_are}", path)
            value = installed[name]
        try:
            return importlib.metadata.EntryPoint(name, value, self.group).load()
        except Exception as e:
            raise WeirError(
                f"the {self.kind} {name!r} ({value}) cannot be imported: {type(e).__name__}: {e}", path
            ) from e

    def make(self, plugin: Any, name: str, options: Mapping[str, Any], path: str) -> Any:
        """Make an object of a plugin's class with its options.

        Raise WeirError naming the field under `path`, if the class refuses the options.
        """
        try:
            return plugin(**options)
        except WeirError as e:
            raise WeirError(e.message, f"{path}.{name}.{e.field}" if e.field else f"{path}.{name}") from None
        except Exception as e:
            raise WeirError(f"the {self.kind} cannot be set up: {type(e).__name__}: {e}", f"{path}.{name}") from e


@functools.cache
def warn_unused(kind: str, name: str, package: str, value: str, used: str) -> None:
    logger.warning("the %s %r of %s (%s) is not used, as %s has the same name", kind, name, package, value, used)
