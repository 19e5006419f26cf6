"""The lenses of a server: ``--weir-lens NAME=PATH``."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from vllm_weir.errors import WeirError, brief
from vllm_weir.lenses.files import open_lens
from vllm_weir.server.limits import LENSES as VARIABLE
from vllm_weir.server.names import NamedOption
from vllm_weir.server.state import ServerState

OPTION = "--weir-lens"
_NAMED = NamedOption(OPTION, VARIABLE)


def put_options(options: list[str], environ: MutableMapping[str, str]) -> None:
    _NAMED.put(options, _parse, environ)


def _parse(option: str) -> tuple[str, str]:
    name, equals, path = option.partition("=")
    if not equals or not name or not path:
        raise WeirError(f"expected NAME=PATH, got {brief(option)!r}", OPTION)
    open_lens(path, OPTION)
    return name, os.path.abspath(path)


async def load_given(state: ServerState, environ: Mapping[str, str] = os.environ) -> None:
    async def load(name: str, path: str) -> None:
        state.frontend.names.load_lens(name, path)

    await _NAMED.load(state, load, environ)
