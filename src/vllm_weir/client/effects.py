"""Effects that a flow asks its client to carry out, and their results.

A flow (`vllm_weir.client.protocol`) is a generator that yields effects and is sent their results,
so what the two clients do is written once, without I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple


@dataclass(frozen=True)
class SendRequest:
    """A request whose whole response is read.

    The result is an `HttpResponse`; without one, `ConnectionLost` is thrown into the flow.

    Attributes:
        path: The path on the server.
        json: The body as JSON data.
        content: The body as bytes, if `json` is None.
        repeatable: Whether sending the request twice does the same as sending it once.
        admin: Whether the request needs the admin key.
    """

    method: str
    path: str
    json: Any = None
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True
    admin: bool = False


@dataclass
class DownloadBody:
    """A request whose response body is written to `sink` as it arrives.

    The `HttpResponse` has an empty body. A response with a status other than 200 or 206 is read as
    by `SendRequest`.

    Attributes:
        start: The first byte that the request asks for.
        tag: The response's ``ETag``, known even if its body breaks off.
    """

    request: SendRequest
    sink: BinaryIO
    start: int = 0
    tag: str = ""

    def begin(self, headers: Mapping[str, str]) -> None:
        """Seek `sink` to the first byte of a response with these headers.

        Raises:
            ConnectionLost: If the response begins neither at 0 nor at `start`.
        """
        first, _ = content_range(headers)
        if first not in (0, self.start):
            raise ConnectionLost(f"asked for bytes from {self.start}, the server sends them from {first}", True)
        self.tag = headers.get("etag", "")
        self.sink.seek(first)


@dataclass(frozen=True)
class OpenStream:
    """A request whose response stays open; with status 200 the `HttpResponse` has no body."""

    request: SendRequest


@dataclass(frozen=True)
class ReadChunk:
    """A read of the next bytes of the open response; the result is None at its end."""


@dataclass(frozen=True)
class EmitValue:
    """A value for the caller who iterates over the flow."""

    value: Any


@dataclass(frozen=True)
class Sleep:
    """A pause."""

    seconds: float


class HttpResponse(NamedTuple):
    """A response; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""


class ConnectionLost(Exception):
    """No complete response was received.

    Attributes:
        why: The reason, for the user.
        sent: Whether the server may have seen the request.
    """

    def __init__(self, why: str, sent: bool) -> None:
        self.why, self.sent = why, sent
        super().__init__(why)


Effect = SendRequest | DownloadBody | OpenStream | ReadChunk | EmitValue | Sleep


def content_range(headers: Mapping[str, str]) -> tuple[int, int | None]:
    """Return the first byte that a response carries and the size of the whole, None if unknown.

    Raises:
        ConnectionLost: If ``Content-Range`` is malformed.
    """
    text = headers.get("content-range")
    if text is None:
        length = headers.get("content-length", "")
        encoded = headers.get("content-encoding", "identity") != "identity"
        return 0, int(length) if length.isdigit() and not encoded else None
    unit, _, rest = text.partition(" ")
    span, _, total = rest.partition("/")
    first = span.partition("-")[0]
    if unit != "bytes" or not first.isdigit():
        raise ConnectionLost(f"the server sent a malformed Content-Range: {text[:80]!r}", True)
    return int(first), int(total) if total.isdigit() else None
