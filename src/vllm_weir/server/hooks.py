"""The hooks of a server: functions that its operator names, imported by each of its processes."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import replace

from vllm_weir.errors import WeirError, brief
from vllm_weir.frontend.admission.vector_registry import RegistryContents
from vllm_weir.schema.fields import with_fields
from vllm_weir.schema.functions import describe_in, find
from vllm_weir.schema.named_hooks import nearest
from vllm_weir.schema.user_hooks import Hook
from vllm_weir.server.limits import HOOKS as VARIABLE
from vllm_weir.server.names import NamedOption
from vllm_weir.server.shared.store_state import StoreState
from vllm_weir.server.state import ServerState

OPTION = "--weir-hook"
_NAMED = NamedOption(OPTION, VARIABLE)
_NAME = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_PLACE = re.compile(f"({_NAME}):({_NAME})")


def put_options(options: list[str], environ: MutableMapping[str, str]) -> None:
    _NAMED.put(options, _parse, environ)


def _parse(option: str) -> tuple[str, str]:
    name, equals, place = option.partition("=")
    if not equals or not _PLACE.fullmatch(place):
        raise WeirError(
            f"expected NAME=module:attribute, got {brief(option, 200)!r}; a function is imported, and no file of "
            "pickle, .pt or .pt2 is loaded, which could run anything",
            OPTION,
        )
    return name, place


def check_given(environ: Mapping[str, str] = os.environ) -> None:
    """Import what the environment names, so that a server does not start without it.

    Modules of the working directory are found, in the server's other processes, too. Raises WeirError if one cannot be
    imported, or is neither a `Hook` nor a function.
    """
    given = _NAMED.given(environ)
    if given and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for name, place in given.items():
        with _NAMED.at(name):
            load(place)


async def load_given(state: ServerState, environ: Mapping[str, str] = os.environ) -> None:
    async def register(name: str, place: str) -> None:
        state.frontend.names.register_hook(name, load(place))
        await state.change(lambda: _share(state, name, place))

    await _NAMED.load(state, register, environ)


def _share(state: ServerState, name: str, place: str) -> None:
    """Tell the servers of a store, if there is one, what a name stands for; none imports what another one names."""

    def edit(contents: RegistryContents) -> RegistryContents:
        there = contents.hooks.get(name, place)
        if there != place:
            raise WeirError(f"other servers of the store have it as {there}; name {place} otherwise")
        return contents if name in contents.hooks else replace(contents, hooks={**contents.hooks, name: place})

    if isinstance(state.names, StoreState):
        state.names.change(edit)


def load(place: str) -> Hook:
    """Return the hook, or that of the function, which ``module:attribute`` names.

    Raises WeirError if it cannot be imported, or is something else.
    """
    module_name, attribute = place.split(":")
    try:
        found = module = importlib.import_module(module_name)
    except Exception as e:  # noqa: BLE001 - whatever the operator's module raises
        raise WeirError(f"cannot import {module_name}: {type(e).__name__}: {e}") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = nearest(part, {one: None for one in vars(module) if not one.startswith("_")}, "it has")
            raise WeirError(f"{module_name} has no {attribute}; {near}")
        found = getattr(found, part)
    if isinstance(found, type) or not (isinstance(found, Hook) or callable(found)):
        got = "a class" if isinstance(found, type) else f"a {type(found).__name__}"
        raise WeirError(f"{place} is {got}; expected a weir.Hook, or a function of (rows, ctx)")
    hook = found if isinstance(found, Hook) else Hook(found)
    return with_fields(hook, function=describe_in(module_name, attribute, find(hook.function)))
