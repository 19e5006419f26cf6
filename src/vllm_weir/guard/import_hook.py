"""Callbacks on the import of modules, so that patching imports nothing by itself."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call `callback` with module `name`: now if it is imported, else right after it is.

    If its import is in progress (in another thread, or because it imports the caller), `callback`
    runs with the next import of any other module.
    """
    module = sys.modules.get(name)
    if module is not None and not _importing(module):
        callback(module)
        return
    finder = next((f for f in sys.meta_path if isinstance(f, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.waiting.setdefault(name, []).append(callback)
    finder.late = finder.late or module is not None


def _importing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _Finder:
    """A finder that has the other finders find a module, and hooks into the module's execution.

    Attributes:
        waiting: name of a module -> callbacks to call with it.
        late: whether the execution of one of these modules may have started without a hook.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[ModuleType], None]]] = {}
        self.late = False
        self._searching: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if self.late:
            self._catch_up()
        if fullname not in self.waiting or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is not None and spec.loader is not None:
            self._hook(spec)
        return spec

    def _hook(self, spec: Any) -> None:
        loader, execute = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            del loader.exec_module
            self._call(spec.name, module)

        loader.exec_module = exec_module

    def _call(self, name: str, module: ModuleType) -> None:
        # A callback that raises makes the import fail, and stays here for the next attempt.
        for callback in self.waiting.get(name, ()):
            callback(module)
        self.waiting.pop(name, None)

    def _catch_up(self) -> None:
        started = {name: sys.modules[name] for name in self.waiting if name in sys.modules}
        self.late = any(map(_importing, started.values()))
        for name, module in started.items():
            if not _importing(module):
                self._call(name, module)
