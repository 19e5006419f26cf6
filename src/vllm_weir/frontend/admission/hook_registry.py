"""The registry of hooks: users' functions that requests name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.named_hooks import MAX_NAME, Use, nearest
from vllm_weir.schema.user_hooks import Hook

MAX_NAMES = 10_000


class HookRegistry:
    """Hooks by name, of one process: code is not shared with others.

    A name is looked up when a request is admitted; changing it later does not change the request.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Hook] = {}

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def put(self, name: str, hook: Hook) -> None:
        if len(self._by_name) >= MAX_NAMES and name not in self._by_name:
            raise WeirError(f"{MAX_NAMES} hooks are registered already; unregister some", "name")
        self._by_name[name] = hook

    def remove(self, name: str) -> None:
        self.find(name, "name")
        del self._by_name[name]

    def find(self, name: str, field: str) -> Hook:
        """Return the hook under a name; raise WeirError naming `field` if there is none."""
        hook = self._by_name.get(name) if isinstance(name, str) else None
        if hook is None:
            known = nearest(name, self._by_name, "registered are") if self._by_name else "none is"
            how = "weir.register_hook does that, or weir serve --weir-hook NAME=module:attribute"
            raise WeirError(f"no hook is registered under {brief(name)!r}; {known} ({how})", field)
        return hook

    def resolve(self, use: Use, lookup: Callable[[str, str], np.ndarray]) -> Hook:
        """Return what a `Use` does; raise WeirError naming the field that is wrong."""
        return use.resolve(self.find(use.name, f"{use.path}.name"), lookup)

    def infos(self) -> dict[str, dict[str, Any]]:
        return {name: _info(hook) for name, hook in sorted(self._by_name.items())}


def check_hook(name: object, hook: object) -> Hook:
    """Return a hook, or that of a function alone, under the name that it is to have; raise WeirError for others."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise WeirError(f"a name is a string of 1 to {MAX_NAME} characters", "name")
    return hook if isinstance(hook, Hook) else Hook(hook, path="hook")


def _info(hook: Hook) -> dict[str, Any]:
    args = {
        name: {"dtype": value[0], "shape": list(value[1])} if isinstance(value, tuple) else value
        for name, value in hook.args.items()
    }
    layers = hook.layers if isinstance(hook.layers, str) else list(hook.layers)
    told = {"function": hook.function.name, "hook": hook.hook, "layers": layers, "args": args, "mode": hook.mode}
    return told | {"positions": hook.positions.to_json(), "state": list(hook.state)}
