"""A server without an engine: Weir's routes on a FastAPI app, with a desk that has been told a model's facts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException

from tests.unit.frontends import frontend_of
from tests.unit.request_strategies import served
from vllm_weir.compat.rhizonymph import routes as fork
from vllm_weir.compat.rhizonymph import steering
from vllm_weir.compat.vllm_lens import routes as lens
from vllm_weir.errors import WeirError
from vllm_weir.frontend.admission.engine_info import EngineCapabilities
from vllm_weir.schema.hooks import Site
from vllm_weir.server.errors import TYPES, error, weir_error
from vllm_weir.server.limits import ServerLimits
from vllm_weir.server.routes import activations, lists, marks, probes, saes, vectors
from vllm_weir.server.routes.router import BodyLimit
from vllm_weir.server.state import ServerState
from vllm_weir.worker.saes import WorkerSAEs

D, LAYERS, KEY = 8, 4, "admin-key"
ADMIN = {"X-Weir-Admin-Key": KEY}
FACTS = EngineCapabilities(served(LAYERS, {Site("resid_mid", 2)}), LAYERS, D, "float32", 1 << 20)
HEADS, NEURONS = (4, 2), (3 * D,)
SHAPES = {Site(hook, layer): HEADS for hook in ("q", "q_rot", "z") for layer in range(LAYERS)}
SHAPES |= {Site(hook, layer): NEURONS for hook in ("mlp_pre", "mlp_post") for layer in range(LAYERS)}
PART_FACTS = replace(FACTS, sites={**FACTS.sites, **dict.fromkeys(SHAPES, "")}, shapes=SHAPES)
"""With points inside attention and MLP, too."""


class Server(ServerState):
    """One API-server process; those with the same `key` are one server."""

    def __init__(
        self,
        folder: Path,
        key: int,
        admin_key: str | None = KEY,
        facts: EngineCapabilities = FACTS,
        engine: Any = None,
        **limits: Any,
    ) -> None:
        super().__init__(engine, frontend_of(facts), ServerLimits(directory=str(folder), **limits), CollectorRegistry())
        self.admin_key = admin_key
        self.open(key)

    async def capabilities(self) -> EngineCapabilities:
        return self.frontend.engine.require_capabilities()


class Workers:
    """An engine client with two workers, each with room for so many bytes of autoencoders."""

    def __init__(self, limit: int) -> None:
        self.workers = [WorkerSAEs(torch.device("cpu"), limit) for _ in range(2)]
        self.calls: list[str] = []

    async def collective_rpc(self, method: str, args: tuple = ()) -> list[Any]:
        self.calls.append(method)
        name = method.removeprefix("weir_").removesuffix("_sae")
        return [getattr(worker, name)(*args) for worker in self.workers]

    @property
    def loaded(self) -> list[int]:
        return [len(worker) for worker in self.workers]


@cache
def _routes() -> list[Any]:
    """The routes, which ask their app for its server: they are the same for all apps, and take long to make."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    for module in (activations, fork, lens, lists, marks, probes, saes, steering, vectors):
        app.include_router(module.router())
    return list(app.router.routes)


def app_of(server: ServerState) -> FastAPI:
    """The routes, with errors answered as vLLM's server answers them."""
    app = FastAPI()
    app.router.routes.extend(_routes())
    app.add_middleware(BodyLimit, max_bytes=server.limits.body_bytes)
    app.add_exception_handler(WeirError, weir_error)
    app.add_exception_handler(
        HTTPException, lambda _r, e: error(e.status_code if e.status_code in TYPES else 404, str(e.detail))
    )
    app.add_exception_handler(RequestValidationError, lambda _r, e: error(400, str(e.errors()[0]["msg"])))
    app.state.weir = server
    return app


@contextmanager
def serving(folder: Path, processes: int = 1, **options: Any) -> Iterator[list[Server]]:
    """The states of the processes of one server."""
    servers = [Server(folder, os.getpid(), **options) for _ in range(processes)]
    try:
        yield servers
    finally:
        for server in servers:
            if server.directory is not None:
                server.directory.close()
