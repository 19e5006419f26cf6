"""``--weir-store URL``: names and results that several servers of one model share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path

from vllm_weir.errors import WeirError
from vllm_weir.frontend import saes as loading
from vllm_weir.frontend.admission.vector_registry import RegistryContents
from vllm_weir.server.limits import STORE as VARIABLE
from vllm_weir.server.shared.directory import locked
from vllm_weir.server.shared.store import FIELD as OPTION
from vllm_weir.server.shared.store import check_url
from vllm_weir.server.shared.store_state import StoreState
from vllm_weir.server.state import ServerState

logger = logging.getLogger(__name__)


def put_option(values: list[str], environ: MutableMapping[str, str]) -> None:
    """Put the value of `OPTION` into the environment; raise WeirError if no store can be there."""
    if len(values) > 1:
        raise WeirError("is given twice; a server has one store", OPTION)
    url = values[0] if values else environ.get(VARIABLE)
    if url:
        environ[VARIABLE] = check_url(url)


async def load_given(state: ServerState) -> None:
    """Load what the store has, and follow it from now on.

    Raises WeirError if it is another model's, or cannot be reached.
    """
    names = state.names
    if not isinstance(names, StoreState):
        return
    sizes = await state.capabilities()
    model = {
        "served_model_name": state.model,
        "num_layers": sizes.num_layers,
        "d_model": sizes.d_model,
    }
    arrivals = Arrivals(state, names, asyncio.get_running_loop())
    try:
        await state.change(lambda: names.start(model, arrivals.arrive))
    except OSError as e:
        raise WeirError(f"{state.limits.store} cannot be used: {e}", OPTION) from None


class Arrivals:
    """Gets one process of a server ready for what other servers name: autoencoders on the workers, files of lenses."""

    def __init__(self, state: ServerState, names: StoreState, loop: asyncio.AbstractEventLoop) -> None:
        self._state, self._names, self._loop = state, names, loop
        self._saes: dict[str, str] = {}
        self._lenses: dict[str, list[str]] = {}
        self._warned: set[str] = set()

    def arrive(self, contents: RegistryContents) -> Callable[[], None]:
        """Do what contents need, and return what lets go of the rest; both run beside the event loop.

        Raises OSError if something cannot be loaded.
        """
        there = {sae.key: sae.path for sae in contents.saes.values()}
        try:
            for key in there.keys() - self._saes.keys():
                self._load(key, Path(there[key]))
            for name, files in contents.lenses.items():
                if self._lenses.get(name) != list(files):
                    self._name_lens(name, [Path(file) for file in files])
        except WeirError as e:
            raise OSError(f"what another server has loaded cannot be loaded here: {e}") from e
        self._saes |= there
        self._warn_of_hooks(contents)
        return lambda: self._let_go(there)

    def _let_go(self, there: Mapping[str, str]) -> None:
        for key in self._saes.keys() - there.keys():
            self._call(loading.UNLOAD, key)
            Path(self._saes.pop(key)).unlink(missing_ok=True)  # who has mapped it keeps it

    def _warn_of_hooks(self, contents: RegistryContents) -> None:
        given = self._state.frontend.names.hooks.names
        for name in contents.hooks.keys() - set(given) - self._warned:
            self._warned.add(name)
            logger.warning(
                "other servers of the store have the hook %r, this one does not; start it with --weir-hook %s=%s",
                *(name, name, contents.hooks[name]),
            )

    def _load(self, key: str, path: Path) -> None:
        """Have the workers load an autoencoder, once for all processes of this server."""
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            if path.exists():  # loaded by the process that put it there
                return
            copy = path.with_suffix(".new")
            self._names.fetch(path, copy)
            self._call(loading.LOAD, key, str(copy))
            copy.rename(path)

    def _call(self, method: str, *arguments: str) -> None:
        async def call() -> list[dict[str, str]]:
            return await loading.caller_of(self._state.engine_client)(method, *arguments)

        for answer in asyncio.run_coroutine_threadsafe(call(), self._loop).result():
            if answer and "error" in answer:
                raise WeirError(answer["error"], answer["field"])

    def _name_lens(self, name: str, files: list[Path]) -> None:
        files[0].parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(files[0].parent / ".lock"):
            for file in files:
                if not file.exists():
                    self._names.fetch(file, file)
        self._state.frontend.names.load_lens(name, files[0] if len(files) == 1 else files[0].parent)
        self._lenses[name] = list(map(str, files))
