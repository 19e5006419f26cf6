"""State that the routes of one API-server process share."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from prometheus_client import REGISTRY, CollectorRegistry

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.admission.vector_registry import RegistryContents
from vllm_weir.frontend.engine_frontend import EngineFrontend
from vllm_weir.results.activations import Activations
from vllm_weir.server.limits import ADMIN_KEY, ServerLimits
from vllm_weir.server.metrics import ServerMetrics
from vllm_weir.server.request import ByDefault
from vllm_weir.server.shared.directory import SharedDirectory
from vllm_weir.server.shared.peers import Peers
from vllm_weir.server.shared.result_files import ResultFiles
from vllm_weir.server.shared.state_files import SharedState
from vllm_weir.server.shared.store import Store, check_url
from vllm_weir.server.shared.store_results import StoreResults
from vllm_weir.server.shared.store_state import StoreState

logger = logging.getLogger(__name__)

T = TypeVar("T")
THREADS = 8
"""Responses that can wait for their rows at the same time."""
CHANGES = 4
"""Changes of what is kept under names at the same time, which read files that may be far away, or wait."""


class ServerState:
    """The state of one API-server process.

    Attributes:
        admin_key: The key that allows changes to the steering of every request; None allows nobody.
        directory: The directory shared with the server's other processes; None until Weir's routes
            are on.
        spool: The results by reference; None until Weir's routes are on.
        model: The name under which vLLM serves the model; empty until Weir's routes are on.
        by_default: What is done with requests that have none of Weir's keys; None for nothing.
        peers: The server's other API-server processes; None if there are none.
        cpu_lock: Held while a thread builds a response from rows that have arrived. More of them at
            a time would take the interpreter from the event loop without finishing sooner.
    """

    def __init__(
        self,
        engine_client: Any,
        frontend: EngineFrontend,
        limits: ServerLimits | None = None,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self.engine_client = engine_client
        self.frontend = frontend
        self.limits = limits or ServerLimits.load()
        self.admin_key: str | None = os.environ.get(ADMIN_KEY) or None
        self.directory: SharedDirectory | None = None
        self.spool: ResultFiles | None = None
        self.peers: Peers | None = None
        self.model = ""
        self.by_default: ByDefault | None = None
        self.cpu_lock = threading.Lock()
        self._names: SharedState | StoreState | None = None
        self._metrics: ServerMetrics | None = None
        self._registry = registry
        self._threads = ThreadPoolExecutor(THREADS, "weir-answer")
        self._changes = ThreadPoolExecutor(CHANGES, "weir-change")
        frontend.serve(self.limits.rows)
        frontend.pacing.pace = self.limits.pace

    def open(self, key: int, model: str = "") -> None:
        """Open what Weir's routes need; the children of process `key` share the server's directory."""
        self.directory = SharedDirectory(key, self.limits.directory)
        spool, limits = self.directory.subdirectory("spool"), self.limits
        store = Store(check_url(limits.store)) if limits.store else None
        if store is None or store.folder is not None:
            if store is not None and store.folder is not None:
                spool = store.folder / "results"
                spool.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.spool = ResultFiles(spool, limits.spool_bytes, limits.spool_seconds)
        else:
            self.spool = StoreResults(store, spool, limits.spool_bytes, limits.spool_seconds)
        self._names = self.frontend.names.source = (
            SharedState(self.directory.subdirectory("shared"))
            if store is None
            else StoreState(store, self.directory.path)
        )
        self.model = model or self.frontend.model
        self.frontend.observer = self._metrics = ServerMetrics(self.frontend, self.model, self.spool, self._registry)

    @property
    def names(self) -> SharedState | StoreState:
        """Vectors and modules by name, and the steering of every request. Raises WeirError if Weir's routes are off."""
        if self._names is None:
            raise WeirError("this server has none of Weir's routes; start it with `weir serve`")
        return self._names

    def newest_names(self) -> RegistryContents:
        """Return what is under names now, also by other servers of the store; may wait for it."""
        if isinstance(self.names, StoreState):
            self.names.refresh()
        return self.names.read()

    async def capabilities(self) -> EngineCapabilities:
        """Return the engine's capabilities, asking its workers once.

        Raises WeirError if the engine cannot serve Weir's keys.
        """
        from vllm_weir.frontend.lookup import ask_workers

        await ask_workers(self.engine_client)
        return self.frontend.engine.require_capabilities()

    def tokenizer(self) -> Any:
        tokenizer: Any = self.frontend.engine.vocabulary.tokenizer
        if tokenizer is None:
            raise WeirError("this server has no tokenizer", "prompt")
        return tokenizer

    async def run(self, job: Callable[[], T], undo: Callable[[], None] = lambda: None) -> T:
        """Run `job`, which waits or copies for a response, in a thread, and `undo` if the caller was cancelled."""
        return await self._run(self._threads, job, undo)

    async def change(self, job: Callable[[], T]) -> T:
        """Run `job`, which changes what is kept under names, in a thread that no response waits for."""
        return await self._run(self._changes, job, lambda: None)

    async def _run(self, threads: ThreadPoolExecutor, job: Callable[[], T], undo: Callable[[], None]) -> T:
        future = asyncio.get_running_loop().run_in_executor(threads, job)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:

            def clean_up(done: asyncio.Future[T]) -> None:
                if not done.cancelled():
                    done.exception()  # retrieved, so that asyncio does not log it
                undo()

            future.add_done_callback(clean_up)
            raise

    def keep(self, acts: Activations, size: int, keep_ids: Collection[str] = ()) -> dict[str, Any]:
        """Store rows to be fetched, and return {"id", "url", "expires_in"}.

        `acts`: the rows; `size`: Their bytes; `keep_ids`: Results that must not make room for them. Raises WeirError if
        they cannot be stored.
        """
        if self.spool is None:
            raise WeirError(
                f"{size} bytes are too many to be inline (at most {self.limits.inline_bytes}, "
                "WEIR_SERVE_INLINE_BYTES), and this server has none of Weir's routes to fetch them from; "
                "start it with `weir serve`"
            )
        key = self.spool.put(acts, size, self.cpu_lock, keep_ids)
        return {"id": key, "url": f"/v1/activations/{key}", "expires_in": self.limits.spool_seconds}

    def keep_frames(self, frames: Mapping[str, bytes], keys: list[str]) -> None:
        """Store frames by their keys, which are appended to `keys`: results that must not make room for others.

        Raises WeirError if they cannot be stored.
        """
        for key, frame in frames.items():
            assert self.spool is not None, "a request whose frames are to be fetched is refused without routes"
            self.spool.put_frame(key, frame, keys)
            keys.append(key)

    def forget(self, keys: Collection[str]) -> None:
        """Delete results that nobody will fetch, in a thread: a store may be far away."""
        if (spool := self.spool) is not None and keys:
            self._threads.submit(lambda: [spool.delete(key) for key in keys])

    def inline_bytes(self, asked: int) -> int:
        """Return the most bytes of inline rows: the server's limit if rows cannot be fetched."""
        return asked if self.spool is not None else self.limits.inline_bytes

    async def sweep(self) -> None:
        """Remove expired results periodically."""
        while self.spool is not None:
            await asyncio.sleep(min(self.limits.spool_seconds, 30.0))
            try:
                await self.run(self.spool.sweep)
                if self._metrics is not None:
                    self._metrics.update()
            except OSError as e:
                logger.warning("could not remove expired results in %s, will try again: %s", self.spool.directory, e)


def server_state(request: Request) -> ServerState:
    """Return the state of the process that serves `request` (a FastAPI dependency)."""
    state = getattr(request.app.state, "weir", None)
    if state is None:
        why = getattr(request.app.state, "weir_refusal", "see the server's log")
        raise HTTPException(503, f"Weir is not serving here: {why}")
    return state
