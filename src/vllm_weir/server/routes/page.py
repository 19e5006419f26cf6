"""The page at ``/weir``: chat with the served model, its tokens coloured by a probe. Fixed files, no build step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import Response

FILES = {
    "/weir": ("index.html", "text/html"),
    "/weir/weir.css": ("weir.css", "text/css"),
    "/weir/weir.js": ("weir.js", "text/javascript"),
    "/weir/rows.js": ("rows.js", "text/javascript"),
    "/weir/heatmap.js": ("heatmap.js", "text/javascript"),
}
"""Path -> file and type; nothing else is served."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def router() -> APIRouter:
    """Routes of the page. It holds no secret: what it asks of the server it asks with the key that its user gives."""
    out = APIRouter(tags=["weir page"])
    for path, (name, kind) in FILES.items():
        out.add_api_route(path, _sender(name, kind), methods=["GET"], response_class=Response, include_in_schema=False)
    return out


def _sender(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
    body = (files("vllm_weir.server") / "static" / name).read_bytes()

    async def send() -> Response:
        return Response(body, media_type=f"{kind}; charset=utf-8", headers=HEADERS)

    return send
