"""Lazy imports of a package's public names. Standard library only."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that imports its names lazily.

    Args:
        package: its ``__name__``.
        modules: public name -> where it is: a module, or ``module:name`` if it has another name
            there.
    """

    def getattribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, name_there = modules[name].partition(":")
        value = getattr(importlib.import_module(module), name_there or name)
        vars(sys.modules[package])[name] = value
        return value

    def directory() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return getattribute, directory
