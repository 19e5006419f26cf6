"""The router class of Weir's routes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import fastapi
from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from vllm_weir.server.errors import error
from vllm_weir.server.routes.auth import require_admin


class WeirRoute(APIRoute):
    """A route that checks the admin key before the body, and reports an unreadable body like vLLM.

    FastAPI parses a body before it calls dependencies. For bytes that are not text it raises
    Starlette's error, which vLLM does not convert.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler with these two differences."""
        handle = super().get_route_handler()
        needs_admin = any(one.dependency is require_admin for one in self.dependencies)

        async def handler(request: Request) -> Response:
            if needs_admin:
                require_admin(request)
            try:
                return await handle(request)
            except HTTPException as e:
                if e.status_code != 400 or isinstance(e, fastapi.HTTPException):
                    raise
                return error(400, f"the body cannot be read as JSON: {e.detail}", "body")
            except RequestValidationError as e:
                first = e.errors()[0]
                if first["type"] != "json_invalid":
                    raise
                return error(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}", "body")

        return handler


def weir_router() -> APIRouter:
    return APIRouter(tags=["weir"], route_class=WeirRoute)
