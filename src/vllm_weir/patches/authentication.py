"""vLLM's API key, which vLLM asks for below some paths alone, although other paths lead to the same handlers."""

from __future__ import annotations

from typing import Any

NO_KEY = (
    "this needs the server's API key, which vLLM does not ask for on this route; send it as Authorization: Bearer KEY"
)


def lacks_key(raw_request: Any) -> bool:
    """Return whether a server has API keys and Starlette's request, if a client sent one, carries none of them."""
    for one in () if raw_request is None else raw_request.app.user_middleware:
        # Its module differs between versions.
        if one.cls.__name__ == "AuthenticationMiddleware" and one.cls.__module__.startswith("vllm."):
            return not one.cls(None, *one.args, **one.kwargs).verify_token(raw_request.headers)
    return False
