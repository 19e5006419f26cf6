"""httpx's responses and failures, translated for flows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx

from vllm_weir.client.effects import ConnectionLost, HttpResponse

_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@contextlib.contextmanager
def transport_errors() -> Iterator[None]:
    """Raise `ConnectionLost` where httpx raises a transport error."""
    try:
        yield
    except httpx.TransportError as error:
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ConnectionLost(why, sent=not isinstance(error, _NEVER_SENT)) from error


def http_response(response: httpx.Response, body: bytes = b"") -> HttpResponse:
    """Return `response` as flows receive it, with `body` for its body."""
    return HttpResponse(response.status_code, {k.lower(): v for k, v in response.headers.items()}, body)
