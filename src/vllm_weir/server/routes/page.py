"""The page at ``/weir``, a chat whose tokens a probe colours; its files need no build step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import RedirectResponse, Response

FILES = {
    "/weir": ("index.html", "text/html"),
    "/weir/weir.css": ("weir.css", "text/css"),
    "/weir/weir.js": ("weir.js", "text/javascript"),
    "/weir/rows.js": ("rows.js", "text/javascript"),
    "/weir/vectors.js": ("vectors.js", "text/javascript"),
    "/weir/heatmap.js": ("heatmap.js", "text/javascript"),
    "/weir/features.js": ("features.js", "text/javascript"),
    "/weir/lens.js": ("lens.js", "text/javascript"),
    "/weir/probes.js": ("probes.js", "text/javascript"),
    "/weir/share.js": ("share.js", "text/javascript"),
    "/weir/words.js": ("words.js", "text/javascript"),
    "/weir/inside.js": ("inside.js", "text/javascript"),
}
"""Path -> file and media type; nothing else is served."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def router() -> APIRouter:
    """Return the page's routes.

    They need no key: the page holds no secret, and sends its user's API key with every request.
    """
    routes = APIRouter(tags=["weir page"])
    for path, (name, media_type) in FILES.items():
        send = _sender(name, media_type)
        routes.add_api_route(path, send, methods=["GET"], response_class=Response, include_in_schema=False)
    # A relative address leads to the page behind a proxy's prefix, too.
    routes.add_api_route("/", lambda: RedirectResponse("weir"), methods=["GET"], include_in_schema=False)
    return routes


def _sender(name: str, media_type: str) -> Callable[[], Awaitable[Response]]:
    body = (files("vllm_weir.server") / "static" / name).read_bytes()

    async def send() -> Response:
        return Response(body, media_type=f"{media_type}; charset=utf-8", headers=HEADERS)

    return send
