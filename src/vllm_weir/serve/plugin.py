"""The ``vllm.endpoint_plugins`` entry point: Weir's routes on vLLM's server."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from argparse import Namespace
from typing import Any

from fastapi import FastAPI

from vllm_weir.errors import WeirError
from vllm_weir.serve import activations, info, marks, page, steering, vectors
from vllm_weir.serve.body import BodyLimit
from vllm_weir.serve.errors import weir_error
from vllm_weir.serve.limits import Limits
from vllm_weir.serve.peers import Peers
from vllm_weir.settings import disabled

logger = logging.getLogger(__name__)

ROUTERS = (activations, info, marks, steering, vectors, page)


class Endpoints:
    """vLLM's EndpointPlugin; vLLM takes it only if ``VLLM_PLUGINS`` names ``weir``, as `weir serve` sees to."""

    name = "weir"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, the limit on bodies, and the form of Weir's errors."""
        if disabled():
            return
        for room in ROUTERS:
            app.include_router(room.router())
        # The innermost of vLLM's middlewares: who has no API key is told that, not the limit.
        app.add_middleware(BodyLimit, most=Limits.load().body_bytes)
        app.add_exception_handler(WeirError, weir_error)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Open what the routes share. Several API-server processes are children of one, which names their directory."""
        from vllm_weir.seams.server import served_name, server_of

        if disabled() or engine_client is None:
            return
        server = server_of(engine_client)
        several = (getattr(args, "api_server_count", None) or 1) > 1
        server.open(os.getppid() if several else os.getpid(), served_name(engine_client))
        if several and server.home is not None:
            answer = functools.partial(marks.answer_here, server.desk.board)
            server.peers = Peers(server.home.room("peers"), answer, str(os.getpid()))
            await server.peers.open()
        state.weir = server
        state.weir_sweeper = asyncio.create_task(server.sweep())
        logger.info("Weir's routes are on; results by reference lie in %s", server.home and server.home.path)
