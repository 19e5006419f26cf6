"""The lenses of a server: ``--weir-lens NAME=PATH``."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from vllm_weir.errors import WeirError, brief
from vllm_weir.frontend.admission.vector_registry import RegistryContents
from vllm_weir.lenses.files import TUNED_FILES, open_lens
from vllm_weir.server.limits import LENSES as VARIABLE
from vllm_weir.server.names import NamedOption
from vllm_weir.server.shared.store_state import StoreState
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
        await state.change(lambda: _share(state, name, Path(path)))

    await _NAMED.load(state, load, environ)


def _share(state: ServerState, name: str, path: Path) -> None:
    """Name a lens for the servers of a store, if there is one."""
    if state.directory is None or not isinstance(state.names, StoreState):
        return
    files = [path / file for file in TUNED_FILES] if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    folder = state.directory.subdirectory("lenses") / digest.hexdigest()[:32]
    folder.mkdir(mode=0o700, exist_ok=True)
    for file in files:
        with suppress(FileExistsError):
            (folder / file.name).symlink_to(file)
    shared = [str(folder / file.name) for file in files]

    def edit(contents: RegistryContents) -> RegistryContents:
        if contents.lenses.get(name) == shared:
            return contents
        return replace(contents, lenses={**contents.lenses, name: shared})

    state.names.change(edit)
