"""vllm-lens's routes of hooks, which take and send code: each says what takes its place."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response

from vllm_weir.server.errors import error
from vllm_weir.server.routes.router import weir_router

CALLS = ("register", "collect", "clear", "clear_results", "prefetch", "clear_prefetched")
NO_CODE = (
    "code never comes over HTTP, so there are no hooks to register, collect or clear; the server's operator loads a "
    "function with --weir-hook NAME=module:attribute, and requests name it in hooks"
)


def router() -> APIRouter:
    routes = weir_router()
    for call in CALLS:
        routes.add_api_route(f"/v1/hooks/{call}", _refuse, methods=["POST"], include_in_schema=False)
    return routes


def _refuse() -> Response:
    return error(400, NO_CODE, "hooks")
