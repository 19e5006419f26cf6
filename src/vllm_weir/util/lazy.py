"""Packages whose names are imported when they are first used. Standard library only."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__``, which has the public names only, for a package.

    The names are those that the package's file imports under ``if TYPE_CHECKING:``, so that type
    checkers and Python read one list.
    """

    @cache
    def homes() -> dict[str, tuple[str, str]]:
        """Name -> its module, and its name there."""
        import ast  # most processes that import the package ask it for nothing

        tree = ast.parse(Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8"))
        blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
        return {
            alias.asname or alias.name: (node.module or "", alias.name)
            for block in blocks
            for node in block.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def getattribute(name: str) -> Any:
        # Python itself looks for dunder names that are not there, such as `__path__`.
        if name.startswith("__") or name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, there = homes()[name]
        value = getattr(importlib.import_module(module), there)
        vars(sys.modules[package])[name] = value
        return value

    def directory() -> list[str]:
        there = vars(sys.modules[package])
        return sorted({*(name for name in there if name.startswith("__")), *there["__all__"]})

    return getattribute, directory
