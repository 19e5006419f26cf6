"""What wraps the routes of vLLM's server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from starlette.middleware import Middleware
from starlette.requests import Request

from vllm_weir.patches.server import lacks_key


class AuthenticationMiddleware:
    """As vLLM's, whose module differs between versions."""

    __module__ = "vllm.entrypoints"

    def __init__(self, _app: Any, tokens: list[str]) -> None:
        self.tokens = tokens

    def verify_token(self, headers: Any) -> bool:
        return headers.get("authorization") in self.tokens


def asked(*middlewares: Middleware) -> Request:
    return Request({"type": "http", "headers": [], "app": SimpleNamespace(user_middleware=middlewares)})


def test_a_server_with_keys_wants_one() -> None:
    assert lacks_key(asked(Middleware(AuthenticationMiddleware, tokens=["k"])))
    assert not lacks_key(asked()) and not lacks_key(None)


def test_a_request_without_an_app_needs_no_key() -> None:
    """Ray Serve's ingress hands such requests on."""
    assert not lacks_key(Request({"type": "http", "headers": []}))
