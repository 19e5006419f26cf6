"""For tests only: an ASGI middleware (vLLM's ``--middleware``) that tells what a server still holds."""

from __future__ import annotations

import gc

from starlette.responses import JSONResponse

PATH = "/weir-test/held"


class Held:
    """Answers PATH: views and requests of this API-server process, what its workers hold, results kept."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["path"] != PATH:
            await self.app(scope, receive, send)
            return
        gc.collect()
        state = scope["app"].state
        engine, server = state.engine_client, state.weir
        usage = await engine.collective_rpc("weir_usage")
        await JSONResponse(
            {
                "store": len(server.desk.store),
                "requests": len(engine.output_processor.request_states),
                "workers": sum(n for held in usage for n in held.values()),
                "spool": len(server.spool),
            }
        )(scope, receive, send)
