"""Weir where a package that it declares cannot be imported, while vLLM, which may need it too, has it."""

from __future__ import annotations

import builtins
import importlib.metadata
import re
from typing import Any

from vllm_weir.guard.refuse import module_of

WITHOUT = "WEIR_TEST_WITHOUT"
"""Environment variable: what the processes that an engine starts cannot import."""


def declared() -> list[str]:
    """The modules of the packages that the distribution requires, without its extras."""
    found = importlib.metadata.requires("vllm-weir") or []
    names = [re.match(r"[\w.-]+", line)[0] for line in found if "extra" not in line.partition(";")[2]]
    return sorted(map(module_of, names))


def block(module: str) -> None:
    """From now on Weir cannot import `module` in this process; what is imported already has it."""
    import_ = builtins.__import__

    def without(name: str, globals: Any = None, *rest: Any, **more: Any) -> Any:
        importer = (globals or {}).get("__name__") or ""
        ours = importer.partition(".")[0] == "vllm_weir" and not (rest[2:] and rest[2])
        if ours and name.partition(".")[0] == module:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        return import_(name, globals, *rest, **more)

    builtins.__import__ = without
