"""Packages whose names are imported when they are first used. Standard library only."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__``, which has the public names only, for a package.

    Args:
        package: its ``__name__``.
        modules: public name -> its module, or ``module:name`` if it has another name there.
    """

    def getattribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, attribute = modules[name].partition(":")
        value = getattr(importlib.import_module(module), attribute or name)
        vars(sys.modules[package])[name] = value
        return value

    def directory() -> list[str]:
        there = vars(sys.modules[package])
        return sorted({*(name for name in there if name.startswith("__")), *there["__all__"]})

    return getattribute, directory
