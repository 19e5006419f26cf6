"""The ``vllm.endpoint_plugins`` entry point: Weir's routes on vLLM's server.

vLLM logs and ignores a plugin that cannot be imported, so this module imports with the standard
library alone. If anything else is missing, routes that report it stand in for Weir's.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import os
from argparse import Namespace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_weir.config.env import disabled
from vllm_weir.guard import refuse as guard

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger(__name__)

ROUTES = ("activations", "lists", "info", "marks", "probes", "saes", "vectors", "page")
ROUTERS = (
    *(f"vllm_weir.compat.{name}" for name in ("rhizonymph.routes", "rhizonymph.steering", "vllm_lens.routes")),
    *(f"vllm_weir.server.routes.{name}" for name in ROUTES),
)
"""Modules with a function `router`."""
LOADERS = tuple(
    f"vllm_weir.{name}"
    for name in (
        "server.store",
        "server.saes",
        "compat.rhizonymph.modules",
        "server.hooks",
        "server.lenses",
        "compat.default_capture",
        "server.shipped",
        "server.warm",
    )
)
"""Modules with a function `load_given`, which loads what the server was started with; the last one warms it."""
PREFIXES = (
    "/v1/weir",
    "/v1/activations",
    "/v1/hooks",
    "/v1/lenses",
    "/v1/marks",
    "/v1/patch_source",
    "/v1/patch_sweep",
    "/v1/probes",
    "/v1/saes",
    "/v1/steering",
    "/v1/vectors",
    "/weir",
)
"""Prefixes of the paths of all routes."""


class Endpoints:
    """vLLM's EndpointPlugin.

    vLLM loads it only if ``VLLM_PLUGINS`` names ``weir``, which `weir serve` sets.
    """

    name = "weir"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, the limit on request bodies, and the handler of Weir's errors."""
        if disabled():
            return
        try:
            modules = load_route_modules()
        except Exception as e:
            why = guard.cause_of(e)
            logger.error("Weir's routes are off: %s", why, exc_info=e)
            _attach_refusals(app, why)
            return
        from vllm_weir.errors import WeirError
        from vllm_weir.server.errors import weir_error
        from vllm_weir.server.limits import ServerLimits
        from vllm_weir.server.routes.router import BodyLimit

        for module in modules:
            app.include_router(module.router())
        # Inside vLLM's own middlewares: without an API key, that is the error, not the limit.
        app.add_middleware(BodyLimit, max_bytes=ServerLimits.load().body_bytes)
        app.add_exception_handler(WeirError, weir_error)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Open what the routes share.

        Several API-server processes are children of one process, whose id names their directory.
        """
        if disabled() or engine_client is None:
            return
        try:
            load_route_modules()
            from vllm_weir.frontend.lookup import has_frontend
            from vllm_weir.server.context import served_name, server_of
            from vllm_weir.server.routes import marks
            from vllm_weir.server.shared.peers import Peers

            loaders = [importlib.import_module(name) for name in LOADERS]
        except Exception as e:  # noqa: BLE001 - as in attach_router
            state.weir_refusal = guard.cause_of(e)
            return
        if not has_frontend(engine_client):
            state.weir_refusal = guard.refusal_here() or "this engine was created before Weir was loaded"
            logger.error("Weir's routes are off: %s", state.weir_refusal)
            return
        server = server_of(engine_client)
        several = (getattr(args, "api_server_count", None) or 1) > 1
        server.open(os.getppid() if several else os.getpid(), served_name(engine_client))
        if several and server.directory is not None:
            answer = functools.partial(marks.answer_here, server.frontend.manager)
            server.peers = Peers(server.directory.subdirectory("peers"), answer, str(os.getpid()))
            await server.peers.open()
        for loader in loaders:
            await loader.load_given(server)
        state.weir = server
        state.weir_sweeper = asyncio.create_task(server.sweep())
        logger.info("Weir's routes are on; results by reference are in %s", server.directory and server.directory.path)
        if getattr(args, "port", None) and not getattr(args, "uds", None):
            host = args.host if args.host not in (None, "", "0.0.0.0", "::") else "localhost"
            scheme = "https" if getattr(args, "ssl_certfile", None) else "http"
            print(f"Weir's page: {scheme}://{host}:{args.port}/weir", flush=True)


def load_route_modules() -> list[ModuleType]:
    return [importlib.import_module(name) for name in ROUTERS]


def _attach_refusals(app: FastAPI, why: str) -> None:
    """Add routes that answer with the reason why Weir's own are missing."""
    from fastapi.responses import JSONResponse

    error = {"message": why, "type": "ServiceUnavailable", "param": None, "code": 503}
    methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]

    async def refuse() -> JSONResponse:
        return JSONResponse({"error": error}, 503)

    for prefix in PREFIXES:
        for path in (prefix, f"{prefix}/{{rest:path}}"):
            app.add_api_route(path, refuse, methods=methods, include_in_schema=False)
