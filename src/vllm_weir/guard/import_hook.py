"""Run something as soon as a module has been imported, so that holding a seam imports nothing by itself."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call `callback` with module `name`: now if it is imported, else right after it is."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        callback(module)
        return
    finder = next((f for f in sys.meta_path if isinstance(f, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.waiting.setdefault(name, []).append(callback)
    if module is not None:
        finder.hook(module.__spec__)


class _Finder:
    """Finds nothing itself: lets the other finders find the module and hooks into its execution."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[ModuleType], None]]] = {}
        self._searching: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in self.waiting or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is not None and spec.loader is not None:
            self.hook(spec)
        return spec

    def hook(self, spec: Any) -> None:
        loader, execute = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            del loader.exec_module
            # One that raises makes the import fail; whoever tries again must not get the module without it.
            for callback in self.waiting.get(spec.name, ()):
                callback(module)
            self.waiting.pop(spec.name, None)

        loader.exec_module = exec_module
