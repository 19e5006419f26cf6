"""The modules that a server registers when it starts, as ``--steering-modules`` of the fork RhizoNymph/vllm."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from pydantic import ValidationError

from vllm_weir.compat.rhizonymph.steering import register_module
from vllm_weir.compat.rhizonymph.steering_schemas import RegisterModule
from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.fields import loads
from vllm_weir.server.limits import MODULES as VARIABLE
from vllm_weir.server.names import NamedOption
from vllm_weir.server.state import ServerState

OPTION = "--steering-modules"
_NAMED = NamedOption(OPTION, VARIABLE, any_name=True)


def put_options(options: list[str], environ: MutableMapping[str, str]) -> None:
    """Put the values of `OPTION`, ``name=path`` or ``{"name", "path"}`` as JSON, into the environment."""
    _NAMED.put(options, _parse, environ)


def _parse(option: str) -> tuple[str, str]:
    name: Any
    path: Any
    name, _, path = option.partition("=")
    if option.startswith("{"):
        given = loads(option, OPTION)
        name, path = (given.get(key) for key in ("name", "path"))
        if set(given) != {"name", "path"}:
            name = ""
    if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
        raise WeirError(f'expected NAME=FILE or {{"name", "path"}}, got {brief(option)!r}', OPTION)
    return name, path


async def load_given(state: ServerState, environ: Mapping[str, str] = os.environ) -> None:
    """Register the modules in the files that the environment names: JSON as `/v1/steering/modules/register` takes."""

    async def register(name: str, path: str) -> None:
        await state.change(functools.partial(_register, state, name, path))

    await _NAMED.load(state, register, environ)


def _register(state: ServerState, name: str, path: str) -> None:
    most = state.limits.body_bytes
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise WeirError(f"{path} has more than {most} bytes (WEIR_SERVE_BODY_BYTES)")
    fields: Any = loads(data, path)
    if not isinstance(fields, Mapping) or "name" in fields:
        raise WeirError(f"{path} holds no tiers: {{vectors, prefill_vectors, ...}}")
    try:
        body = RegisterModule(**fields, name=name)
    except ValidationError as e:
        raise WeirError(f"{path}: {e.errors()[0]['loc']}: {e.errors()[0]['msg']}") from None
    register_module(state, body)
