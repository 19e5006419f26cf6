"""Loading sparse autoencoders: checked here, sent to the workers as a file, entered by name."""

from __future__ import annotations

import asyncio
import inspect
import os
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.sae_registry import LoadedSAE, check_fits
from vllm_weir.frontend.engine_frontend import EngineFrontend
from vllm_weir.frontend.lookup import ask_workers, engine_of
from vllm_weir.sae import transfer
from vllm_weir.sae.autoencoder import SAE, without_decoder
from vllm_weir.sae.cross_layer import split_key
from vllm_weir.schema.intervention_kinds import Kept
from vllm_weir.schema.set_activation import Reconstruction, SetActivation

CallWorkers = Callable[..., Awaitable[list[Any]]]
"""(name of a worker's method, its arguments...) -> what each worker returns."""
LOAD, UNLOAD = "weir_load_sae", "weir_unload_sae"
T = TypeVar("T")


def load(llm: Any, frontend: EngineFrontend, name: str, sae: Any) -> None:
    """Load an autoencoder onto the workers of an ``LLM``; see `vllm_weir.api.load_sae`."""
    call = _blocking_caller_of(engine_of(llm))
    with frontend.names.saes.claimed(name):
        loaded = prepare(frontend, name, sae)
        with _written(loaded) as path:
            completed(send(call, loaded, path))
        frontend.names.saes.put(loaded)


async def load_async(engine: Any, frontend: EngineFrontend, name: str, sae: Any) -> None:
    """Do what `load` does, for an ``AsyncLLM``."""
    await ask_workers(engine)
    with frontend.names.saes.claimed(name):
        loaded = await asyncio.to_thread(prepare, frontend, name, sae)
        file = _written(loaded)
        path = await asyncio.to_thread(file.__enter__)
        try:
            await send(caller_of(engine), loaded, path)
        finally:
            file.__exit__(None, None, None)
        frontend.names.saes.put(loaded)


def unload(llm: Any, frontend: EngineFrontend, name: str) -> None:
    call = _blocking_caller_of(engine_of(llm))
    _refuse_used(frontend, name)
    with frontend.names.saes.removed(name) as loaded:
        completed(call(UNLOAD, loaded.key))


async def unload_async(engine: Any, frontend: EngineFrontend, name: str) -> None:
    _refuse_used(frontend, name)
    with frontend.names.saes.removed(name) as loaded:
        await caller_of(engine)(UNLOAD, loaded.key)


def _refuse_used(frontend: EngineFrontend, name: str) -> None:
    refuse_used(frontend.names.saes.find(name, "name").key, name, frontend.names.always, frontend.names.vectors.modules)


def refuse_used(key: str, name: str, always: Sequence[Kept], modules: Mapping[str, Sequence[Kept]]) -> None:
    """Raise WeirError if what is set for all, or a module, is gated by an autoencoder, or has it encode rows."""
    users = {"what every request undergoes": always}
    users |= {f"the module {module!r}": steps for module, steps in modules.items()}
    for user, interventions in users.items():
        if any(one.when is not None and one.when.sae == name for one in interventions):
            raise WeirError(f"{user} is gated by a feature of {name!r}; clear that first", "name")
        if any(
            isinstance(one, (SetActivation, Reconstruction)) and one.sae and split_key(one.sae)[0] == key
            for one in interventions
        ):
            raise WeirError(f"{user} has the workers encode rows by {name!r}; clear that first", "name")


def prepare(frontend: EngineFrontend, name: str, sae: Any) -> LoadedSAE:
    """Return an autoencoder that `send` may load, from an `SAE` or the path of its files.

    Raise WeirError naming the field, if the engine cannot serve it.
    """
    capabilities = frontend.engine.require_capabilities()
    if isinstance(sae, (str, os.PathLike)):
        sae = SAE.load(sae)
    if not isinstance(sae, SAE):
        raise WeirError(f"expected an SAE, or the path of one, got {type(sae).__name__}", "sae")
    check_fits(sae, capabilities)
    return LoadedSAE.new(name, sae)


async def send(call: CallWorkers, loaded: LoadedSAE, path: Path) -> None:
    """Have every worker load an autoencoder from a file of `vllm_weir.sae.transfer`; all, or none.

    Raise WeirError with the reason of the first worker that cannot.
    """
    try:
        for answer in await call(LOAD, loaded.key, str(path)):
            if "error" in answer:
                raise WeirError(answer["error"], answer["field"])
    except BaseException:
        await call(UNLOAD, loaded.key)
        raise


def caller_of(engine: Any) -> CallWorkers:
    engine = engine_of(engine)
    return lambda method, *arguments: engine.collective_rpc(method, args=arguments)


def completed(coroutine: Awaitable[T]) -> T:
    """Return the result of a coroutine that waits for nothing."""
    assert isinstance(coroutine, Coroutine)
    try:
        coroutine.send(None)
    except StopIteration as e:
        return e.value
    coroutine.close()
    raise AssertionError("it waits for something")


def _blocking_caller_of(engine: Any) -> CallWorkers:
    """Return what calls the workers of an ``LLMEngine``, to be `completed`.

    Raise WeirError if the engine answers only asynchronously.
    """
    if inspect.iscoroutinefunction(engine.collective_rpc):
        raise WeirError("this engine answers only asynchronously; await load_sae_async or unload_sae_async", "llm")

    async def call(method: str, *arguments: Any) -> list[Any]:
        return engine.collective_rpc(method, args=arguments)

    return call


@contextmanager
def _written(loaded: LoadedSAE) -> Iterator[Path]:
    """Yield a file with an autoencoder, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="weir-sae-") as folder:
        path = Path(folder) / "sae.safetensors"
        transfer.write(without_decoder(loaded.sae), path)
        yield path
