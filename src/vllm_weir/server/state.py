"""What the routes of one API-server process share."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from prometheus_client import REGISTRY, CollectorRegistry

from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.frontend.engine_frontend import EngineFrontend
from vllm_weir.results.activations import Activations
from vllm_weir.server.limits import ADMIN_KEY, ServerLimits
from vllm_weir.server.metrics import ServerMetrics
from vllm_weir.server.shared.directory import SharedDirectory
from vllm_weir.server.shared.peers import Peers
from vllm_weir.server.shared.result_files import ResultFiles
from vllm_weir.server.shared.state_files import SharedState

logger = logging.getLogger(__name__)

T = TypeVar("T")
THREADS = 8
"""Answers whose rows may be waited for at a time."""


class ServerState:
    """One API-server process.

    Attributes:
        engine_client: vLLM's.
        frontend: the engine's, in this process.
        limits: what clients may do.
        admin_key: who has it may change what all requests undergo; None: nobody may.
        home: the directory shared with the server's other processes; None until Weir's routes are on.
        spool: results by reference; None likewise.
        peers: the server's other API-server processes; None if there are none.
        work: held by who makes an answer of rows that are here, and waits for nothing. One such thread takes a third of
            the interpreter from the event loop; eight would take more than half and be no sooner done.
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
        self.home: SharedDirectory | None = None
        self.spool: ResultFiles | None = None
        self.peers: Peers | None = None
        self.work = threading.Lock()
        self._names: SharedState | None = None
        self._meter: ServerMetrics | None = None
        self._registry = registry
        self._threads = ThreadPoolExecutor(THREADS, "weir-answer")
        frontend.serve(self.limits.rows)
        frontend.pacing.pace = self.limits.pace

    def open(self, key: int, model: str = "") -> None:
        """Weir's routes are on: `key` is the process whose children share the server's directory, `model` the name in
        metrics."""
        self.home = SharedDirectory(key, self.limits.directory)
        self.spool = ResultFiles(self.home.room("spool"), self.limits.spool_bytes, self.limits.spool_seconds)
        self._names = self.frontend.source = SharedState(self.home.room("shared"))
        self.frontend.observer = self._meter = ServerMetrics(
            self.frontend, model or self.frontend.model, self.spool, self._registry
        )

    @property
    def names(self) -> SharedState:
        """Vectors and modules by name, and what every request undergoes; raises WeirError while the routes are off."""
        if self._names is None:
            raise WeirError("this server has none of Weir's routes; start it with `weir serve`")
        return self._names

    async def capabilities(self) -> EngineCapabilities:
        """The engine's, of which the workers are asked once; raises WeirError if it cannot serve Weir's keys."""
        from vllm_weir.frontend.lookup import ask_workers

        await ask_workers(self.engine_client)
        return self.frontend.require_capabilities()

    async def run(self, job: Callable[[], T], undo: Callable[[], None] = lambda: None) -> T:
        """Do what waits or copies beside the event loop; `undo` follows if the caller is gone before it is done."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, job)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:

            def over(done: asyncio.Future[T]) -> None:
                if not done.cancelled():
                    done.exception()  # nobody else will look at it
                undo()

            future.add_done_callback(over)
            raise

    def keep(self, acts: Activations, size: int, spare: Collection[str] = ()) -> dict[str, Any]:
        """Put rows away to be fetched, beside those under the ids `spare`; says how. Raises WeirError if that cannot
        be."""
        if self.spool is None:
            raise WeirError(
                f"{size} bytes do not go inline (at most {self.limits.inline_bytes}, WEIR_SERVE_INLINE_BYTES), and "
                "this server has none of Weir's routes to fetch them from; start it with `weir serve`"
            )
        key = self.spool.put(acts, size, self.work, spare)
        return {"id": key, "url": f"/v1/activations/{key}", "expires_in": self.limits.spool_seconds}

    def inline_bytes(self, asked: int) -> int:
        """Up to which size rows go inline: where they cannot be fetched, as far as the server allows."""
        return asked if self.spool is not None else self.limits.inline_bytes

    async def sweep(self) -> None:
        """Remove expired results, for ever."""
        while self.spool is not None:
            await asyncio.sleep(min(self.limits.spool_seconds, 30.0))
            try:
                await self.run(self.spool.sweep)
                if self._meter is not None:
                    self._meter.look()
            except OSError as e:
                logger.warning("expired results stay in %s for now: %s", self.spool.directory, e)


def server_state(request: Request) -> ServerState:
    """FastAPI dependency: the state of the process that serves `request`."""
    state = getattr(request.app.state, "weir", None)
    if state is None:
        why = getattr(request.app.state, "weir_refusal", "the server's log says why")
        raise HTTPException(503, f"Weir is not serving here: {why}")
    return state
