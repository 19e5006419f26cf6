"""For tests only: an ASGI middleware (vLLM's ``--middleware``) that tells what a server still holds, and fails requests
as a worker does."""

from __future__ import annotations

from starlette.responses import JSONResponse

PATH, FAIL, ROUTES = "/weir-test/held", "/weir-test/fail", "/weir-test/routes"
WHY = "a test says so"


class Held:
    """Answers PATH: views and requests of this API-server process, what its workers hold for requests, results kept;
    without a run of the garbage collector. FAIL: the next request will have failed. ROUTES: the paths of the app's own
    table that take a POST."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["path"] not in (PATH, FAIL, ROUTES):
            await self.app(scope, receive, send)
            return
        state = scope["app"].state
        if scope["path"] == FAIL:
            fail_next(state.weir.frontend.store)
            await JSONResponse(None)(scope, receive, send)
            return
        if scope["path"] == ROUTES:
            paths = {route.path for route in scope["app"].routes if "POST" in (getattr(route, "methods", None) or ())}
            await JSONResponse(sorted(paths))(scope, receive, send)
            return
        engine, server = state.engine_client, state.weir
        usage = await engine.collective_rpc("weir_usage")
        await JSONResponse(
            {
                "store": len(server.frontend.store),
                "requests": len(engine.output_processor.request_states),
                "workers": sum(n for held in usage for what, n in held.items() if what != "sae_bytes"),
                "spool": len(server.spool),
            }
        )(scope, receive, send)


def fail_next(store) -> None:
    """Have the next request failed, as when a worker's message is lost; from the start, so that it cannot end first."""
    original = store.open

    def failing(pending):
        store.open = original
        original(pending)
        pending.failure = WHY

    store.open = failing
