"""The lenses of a server: ``--weir-lens NAME=PATH``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping

from vllm_weir.errors import WeirError, brief
from vllm_weir.lenses.files import open_lens
from vllm_weir.server.limits import LENSES as VARIABLE
from vllm_weir.server.names import check_name
from vllm_weir.server.state import ServerState

OPTION = "--weir-lens"


def put_options(options: list[str], environ: MutableMapping[str, str]) -> None:
    """Put the values of `OPTION`, ``name=path``, into the environment.

    Raises:
        WeirError: if one is wrong, or a path has no lens.
    """
    paths: dict[str, str] = {}
    for option in options:
        name, equals, path = option.partition("=")
        if not equals or not name or not path:
            raise WeirError(f"expected NAME=PATH, got {brief(option)!r}", OPTION)
        if name in paths:
            raise WeirError(f"{brief(name)!r} is given twice", OPTION)
        check_name(name, OPTION)
        open_lens(path, OPTION)
        paths[name] = os.path.abspath(path)
    if paths:
        environ[VARIABLE] = json.dumps(paths)


async def load_given(state: ServerState, environ: Mapping[str, str] = os.environ) -> None:
    """Name what the environment has, in this process.

    Raises:
        WeirError: if the engine cannot serve one.
    """
    given = json.loads(environ.get(VARIABLE) or "{}")
    if given:
        await state.capabilities()
    for name, path in given.items():
        try:
            state.frontend.names.load_lens(name, path)
        except WeirError as e:
            raise WeirError(f"{name}: {e}", OPTION) from None
