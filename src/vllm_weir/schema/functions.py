"""Functions of users: how they reach the engine's workers.

A function travels by the name of its module, or as its source. It never comes from a client of a server. One that can
travel in neither way, a lambda or a closure, runs where the engine is in the caller's process only, or travels as a
pickle where the setting `functions` of both processes says so.
"""

from __future__ import annotations

import ast
import builtins
import dis
import hashlib
import importlib
import inspect
import re
import secrets
import textwrap
import weakref
from collections import Counter
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any, cast

import msgspec

from vllm_weir.errors import WeirError

SETTING = "the setting functions='cloudpickle' (WEIR_FUNCTIONS=cloudpickle)"
_tokens: weakref.WeakKeyDictionary[Callable[..., Any], str] = weakref.WeakKeyDictionary()
"""Function -> its token: compiled hooks of one function are called together."""
_here: dict[str, Callable[..., Any]] = {}
"""The functions of this process by token, as long as what describes them is there."""
_described_by: Counter[str] = Counter()
"""Token -> how many objects describe its function."""


class Travelling(msgspec.Struct, frozen=True, omit_defaults=True, weakref=True):
    """How a function is found in another process.

    The function is kept as long as the object that `describe` returned, which copies of it are.

    Attributes:
        token: of the process's own table.
        name: of the function; with `module` a dotted path in it.
        module: that has it; "" if the source travels.
        source: of the function.
        imports: name -> module that the source uses under this name.
        why: why it can only be called in the process that made it; "" if it can travel.
        pickled: by cloudpickle, if the engine's settings say so and nothing else will do.
        adapter: ``module:name`` of what makes a function of (rows, ctx) of it; "" if it is one.
    """

    token: str
    name: str
    module: str = ""
    source: str = ""
    imports: dict[str, str] = {}
    why: str = ""
    pickled: bytes = b""
    adapter: str = ""

    def shown(self, name: str) -> str:
        """Return its name, for the repr of what holds it in a field."""
        return self.name

    def __copy__(self) -> Travelling:
        return self

    def __deepcopy__(self, memo: dict) -> Travelling:
        return self


def describe(function: Callable[..., Any], field: str, adapter: str = "") -> Travelling:
    """Return how a function travels.

    Args:
        function: any.
        field: for errors.
        adapter: see `Travelling`.

    Raises:
        WeirError: if it cannot be called.
    """
    if not callable(function):
        got = type(function).__name__
        raise WeirError(f"expected a function of (rows, ctx), got {got}; code never comes over HTTP", field)
    return _kept(msgspec.structs.replace(_described(function), adapter=adapter), function)


def by_authors(saved: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return what functions saved under names of their authors; an adapter's are ``KEY [INDEX, NAME]``."""
    return None if saved is None else {name: value for name, value in saved.items() if not _BY_ADAPTER.match(name)}


_BY_ADAPTER = re.compile(r"[a-z_]+ \[\d+, ", re.ASCII)


def describe_in(module: str, name: str, function: Callable[..., Any]) -> Travelling:
    """Return how a function travels that a dotted path in a module names, itself or the `Hook` that has it."""
    # The same in all processes of a server: their requests can be called together.
    token = hashlib.sha256(f"{module}:{name}".encode()).hexdigest()[:16]
    return _kept(Travelling(token, name, module), function)


def _kept(described: Travelling, function: Callable[..., Any]) -> Travelling:
    """Keep a function as long as what describes it."""
    _here[described.token] = function
    _described_by[described.token] += 1
    weakref.finalize(described, _let_go, described.token).atexit = False
    return described


def _let_go(token: str) -> None:
    _described_by[token] -= 1
    if not _described_by[token]:
        del _described_by[token], _here[token]


def _token_of(function: Callable[..., Any]) -> str:
    try:
        return _tokens.setdefault(function, secrets.token_hex(8))
    except TypeError:  # it has no hash, or cannot be referred to weakly
        return secrets.token_hex(8)


def _described(function: Callable[..., Any]) -> Travelling:
    token, name = _token_of(function), getattr(function, "__qualname__", type(function).__name__)
    module = getattr(function, "__module__", None)
    if module not in (None, "__main__") and _find(module, name) is function:
        return Travelling(token, name, module)
    try:
        source, imports = _source_of(function)
    except (OSError, TypeError, AttributeError, SyntaxError, ValueError, WeirError) as e:
        return Travelling(token, name, why=str(e))
    return Travelling(token, function.__name__, source=source, imports=imports)


def pickled(described: Travelling, field: str) -> Travelling:
    """Return a function of this process as one that travels as a pickle; raise WeirError if it has none."""
    try:
        import cloudpickle

        data = cloudpickle.dumps(_find_described(described))
    except Exception as e:  # noqa: BLE001 - whatever an object's own pickling raises
        raise WeirError(f"{described.name} cannot be pickled: {type(e).__name__}: {e}", field) from None
    return msgspec.structs.replace(described, pickled=data)


def find(described: Travelling, unpickle: bool = False) -> Callable[..., Any]:
    """Return a function that was described, here or in another process, as one of (rows, ctx).

    Args:
        described: the function.
        unpickle: whether the settings of this process allow a pickle.

    Raises:
        WeirError: if it cannot be had here.
    """
    found = _find_described(described, unpickle)
    return _find(*described.adapter.split(":"))(found) if described.adapter else found


def _find_described(described: Travelling, unpickle: bool = False) -> Callable[..., Any]:
    if (function := _here.get(described.token)) is not None:
        return function
    if described.pickled and unpickle:
        import cloudpickle

        return cast(Callable[..., Any], cloudpickle.loads(described.pickled))
    if described.why:
        raise WeirError(
            f"the function {described.name} cannot reach the engine's process: {described.why}; define it in a module "
            "that can be imported, and give numbers and tensors by args, or let the engine run in this process "
            f"(VLLM_ENABLE_V1_MULTIPROCESSING=0), or start it with {SETTING}",
            "hooks",
        )
    if described.module:
        found = _find(described.module, described.name)
        if isinstance(of_hook := getattr(found, "function", None), Travelling):
            return find(of_hook)
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
    defaults = (one for one in (*node.args.defaults, *node.args.kw_defaults) if one is not None)
    in_defaults = {one.id for default in defaults for one in ast.walk(default) if isinstance(one, ast.Name)}
    for name in sorted(_global_names(code) | in_defaults):
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
