"""The sparse autoencoders of a server: loaded onto the workers once, known to all its processes."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from collections.abc import Awaitable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from vllm_weir.errors import StoreError, WeirError
from vllm_weir.frontend import saes as loading
from vllm_weir.frontend.admission.sae_registry import LoadedSAE, SharedSAE
from vllm_weir.frontend.admission.vector_registry import RegistryContents
from vllm_weir.sae import transfer
from vllm_weir.sae.autoencoder import SAE
from vllm_weir.sae.config import NamedPath
from vllm_weir.schema.model_facts import ModelConfig
from vllm_weir.schema.read_outs import SAEInfo
from vllm_weir.server.errors import StateNotSaved
from vllm_weir.server.limits import SAES as VARIABLE
from vllm_weir.server.names import NamedOption, check_name
from vllm_weir.server.shared.directory import locked
from vllm_weir.server.state import ServerState

OPTION = "--weir-sae"
_NAMED = NamedOption(OPTION, VARIABLE)


class SAESource(NamedTuple):
    """Where an autoencoder is."""

    path: str  # of its files, on the server's disk
    site: Any = None  # hook point and block, for files that do not say them


def put_options(options: list[str], environ: MutableMapping[str, str]) -> None:
    """Put the values of `OPTION`, ``name=path`` or ``name=path@hook.layer``, into the environment.

    Raises WeirError if one is wrong.
    """
    _NAMED.put(options, _parse, environ)


def _parse(option: str) -> tuple[str, list[Any]]:
    name, path, site = NamedPath.parse(option, OPTION)
    return name, [path] if site is None else [path, list(site)]


def check_given(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
    """Refuse what `load_given` would refuse once the engine has started, as far as files tell.

    Raises WeirError if one cannot be loaded, or is for another model.
    """
    config = ModelConfig.read(*model_in(arguments))
    for name, source in _NAMED.given(environ).items():
        with _NAMED.at(name):
            path, site = SAESource(*source)
            sae = SAE.load(path, site=site, name=name)
            config.check_layers(sae.site.hook, sae.layers or (sae.site.layer,), "site")
            config.check_width(sae.site.hook, sae.d_in, "d_in")


def model_in(arguments: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the model of ``vllm serve``, empty if it is elsewhere, such as in a file; and its options with a value."""
    options = {}
    for argument, following in itertools.pairwise([*arguments, ""]):
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            options[name[2:].replace("-", "_")] = value if equals else following
    first = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    return options.get("model", first), options


async def load_given(state: ServerState, environ: Mapping[str, str] = os.environ) -> None:
    async def load_one(name: str, source: list[Any]) -> None:
        await load(state, name, SAESource(*source), again=True)

    await _NAMED.load(state, load_one, environ)


async def load(state: ServerState, name: str, source: SAESource, again: bool = False) -> SAEInfo:
    """Load an autoencoder onto the workers, for the requests of all processes; `again`: if it is not loaded yet.

    Raises WeirError, naming the field, if it cannot be loaded.
    """
    check_name(name)
    await state.capabilities()
    loop = asyncio.get_running_loop()
    return await state.change(lambda: _load(state, loop, name, source, again))


async def unload(state: ServerState, name: str) -> bool:
    """Remove an autoencoder; return whether there was one.

    Raises WeirError if what is set for all, or a module, has it encode rows.
    """
    if name not in state.names.read().saes:
        return False
    # Once the name is gone, the workers are told, or it comes back, whoever still waits for that.
    return await asyncio.shield(_unload(state, name))


def infos(state: ServerState) -> list[SAEInfo]:
    state.frontend.names.refresh()
    return state.frontend.names.saes.infos()


async def _unload(state: ServerState, name: str) -> bool:
    """Do what `unload` does; if the workers cannot be told, the name stays."""
    removed: SharedSAE | None = None

    def remove(contents: RegistryContents) -> RegistryContents:
        nonlocal removed
        removed = contents.saes.get(name)
        if removed is None:
            return contents
        loading.refuse_used(removed.key, name, contents.always, contents.modules)
        return replace(contents, saes={kept: one for kept, one in contents.saes.items() if kept != name})

    await state.change(lambda: state.names.change(remove))
    if removed is None:
        return False
    shared = removed

    def put_back(contents: RegistryContents) -> RegistryContents:
        return replace(contents, saes={name: shared, **contents.saes})  # what has taken the name keeps it

    try:
        await loading.caller_of(state.engine_client)(loading.UNLOAD, shared.key)
    except BaseException:
        await state.change(lambda: state.names.change(put_back))
        raise
    Path(shared.path).unlink(missing_ok=True)  # who has mapped it keeps it
    return True


def _load(state: ServerState, loop: asyncio.AbstractEventLoop, name: str, source: SAESource, again: bool) -> SAEInfo:
    """Do what `load` does, in a thread beside the event loop.

    Of several processes of a server one loads.
    """
    there = name in state.names.read().saes
    if not there:
        # Not under the lock: the files may be far away, and a missing one is no failure of the state's disk.
        loaded = loading.prepare(state.frontend, name, SAE.load(source.path, site=source.site, name=name))
        there = not _send(state, loop, loaded)
    if there and not again:
        raise WeirError(f"an autoencoder is loaded as {name!r}; delete it, or choose another name", "name")
    state.frontend.names.refresh()
    return state.frontend.names.saes.find(name, "name").info


def _send(state: ServerState, loop: asyncio.AbstractEventLoop, loaded: LoadedSAE) -> bool:
    """Have the workers load an autoencoder; return whether its name was free."""
    assert state.directory is not None
    folder = state.directory.subdirectory("saes")
    file = folder / f"{secrets.token_hex(8)}.safetensors"
    free = kept = False

    async def call(method: str, *arguments: Any) -> list[Any]:
        done = loading.caller_of(state.engine_client)(method, *arguments)
        return asyncio.run_coroutine_threadsafe(_awaited(done), loop).result()

    def edit(contents: RegistryContents) -> RegistryContents:
        nonlocal free
        free = loaded.name not in contents.saes
        if not free:
            return contents
        return replace(contents, saes={**contents.saes, loaded.name: SharedSAE(loaded.key, str(file))})

    with locked(state.directory.path / "saes.lock"):
        if loaded.name in state.newest_names().saes:
            return False
        try:
            transfer.write(loaded.sae, file)
            loading.completed(loading.send(call, loaded, file))
            state.names.change(edit)
            kept = free
        except StoreError as e:
            raise StateNotSaved(f"the server's disk refused a copy of the autoencoder ({e.message})") from None
        finally:
            if not kept:
                loading.completed(call(loading.UNLOAD, loaded.key))
                file.unlink(missing_ok=True)
    return kept


async def _awaited(done: Awaitable[list[Any]]) -> list[Any]:
    return await done
