"""Functions of users: how they reach the engine's workers.

A function travels by the name of its module, or as its source. It never comes from a client of a server. One that can
travel in neither way, a lambda or a closure, runs where the engine is in the caller's process only.
"""

from __future__ import annotations

import ast
import builtins
import dis
import importlib
import inspect
import secrets
import textwrap
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

import msgspec

from vllm_weir.errors import WeirError
from vllm_weir.util.lru import LruCache

MOST_KEPT = 4096
_here: LruCache[Callable[..., Any]] = LruCache(MOST_KEPT)
"""The last functions of this process that were described, by token."""


class Travelling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a function is found in another process.

    Attributes:
        token: of the process's own table.
        name: of the function; with `module` a dotted path in it.
        module: that has it; "" if the source travels.
        source: of the function.
        imports: name -> module that the source uses under this name.
        why: why it can only be called in the process that made it; "" if it can travel.
        adapter: ``module:name`` of what makes a function of (rows, ctx) of it; "" if it is one.
    """

    token: str
    name: str
    module: str = ""
    source: str = ""
    imports: dict[str, str] = {}
    why: str = ""
    adapter: str = ""


def describe(function: Callable[..., Any], field: str) -> Travelling:
    """Return how a function travels.

    Raises:
        WeirError: if it cannot be called.
    """
    if not callable(function):
        got = type(function).__name__
        raise WeirError(f"expected a function of (rows, ctx), got {got}; code never comes over HTTP", field)
    token, name = secrets.token_hex(8), getattr(function, "__qualname__", type(function).__name__)
    _here.put(token, function, 1)
    module = getattr(function, "__module__", None)
    if module not in (None, "__main__") and _find(module, name) is function:
        return Travelling(token, name, module)
    try:
        source, imports = _source_of(function)
    except (OSError, TypeError, AttributeError, SyntaxError, ValueError, WeirError) as e:
        return Travelling(token, name, why=str(e))
    return Travelling(token, function.__name__, source=source, imports=imports)


def find(described: Travelling) -> Callable[..., Any]:
    """Return a function that was described, here or in another process, as one of (rows, ctx).

    Raises:
        WeirError: if it cannot be had here.
    """
    found = _find_described(described)
    return _find(*described.adapter.split(":"))(found) if described.adapter else found


def _find_described(described: Travelling) -> Callable[..., Any]:
    if (function := _here.get(described.token)) is not None:
        return function
    if described.why:
        raise WeirError(
            f"the function {described.name} cannot reach the engine's process: {described.why}; define it in a module "
            "that can be imported, and give numbers and tensors by args, or let the engine run in this process "
            "(VLLM_ENABLE_V1_MULTIPROCESSING=0)",
            "hooks",
        )
    if described.module:
        found = _find(described.module, described.name)
        if found is None:
            raise WeirError(f"no {described.name} in {described.module}, which the engine's process imports", "hooks")
        return found
    scope: dict[str, Any] = {name: importlib.import_module(module) for name, module in described.imports.items()}
    exec(compile(described.source, f"<hook {described.name}>", "exec"), scope)
    return scope[described.name]


def _find(module: str, name: str) -> Any:
    """Return what a dotted path names in a module, or None."""
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found


def _source_of(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return a function's source, and the modules that it uses by name; raise WeirError if it needs more."""
    code = inspect.unwrap(function).__code__
    source = textwrap.dedent(inspect.getsource(function))
    (node,) = ast.parse(source).body
    if not isinstance(node, ast.FunctionDef):
        raise WeirError("it is not a def of its own")
    if code.co_freevars:
        raise WeirError(f"it uses {', '.join(code.co_freevars)} of the function around it")
    node.decorator_list, node.returns = [], None
    for argument in (*node.args.args, *node.args.kwonlyargs):
        argument.annotation = None
    imports, missing = {}, []
    for name in sorted(_global_names(code)):
        if name in function.__globals__:
            value = function.__globals__[name]
            if isinstance(value, ModuleType):
                imports[name] = value.__name__
            else:
                missing.append(name)
        elif not hasattr(builtins, name):
            missing.append(name)
    if missing:
        raise WeirError(f"it uses {', '.join(missing)} of the module around it")
    return ast.unparse(node), imports


def _global_names(code: CodeType) -> set[str]:
    """Return the names that a function, and those inside it, look up in its module."""
    found = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return found.union(*(_global_names(one) for one in code.co_consts if isinstance(one, CodeType)))
