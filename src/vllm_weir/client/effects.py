"""What a flow asks its transport to do, and what it hears back.

A flow (`vllm_weir.client.protocol`) is a generator that yields these effects and is sent their results: everything that
the two clients do is written once, without I/O, and each transport only carries effects out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple


@dataclass(frozen=True)
class SendRequest:
    """Send a request and read the whole answer: a `HttpResponse`, or `ConnectionLost` is thrown into the flow.

    Attributes:
        path: below the server's address, or absolute on the same server.
        json: the body as JSON data; or `content`: as bytes.
        repeatable: whether sending it twice does the same as once.
        admin: whether it needs the admin key.
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
    """Send a request and write the answer's body to `sink` as it comes; the `HttpResponse` has an empty body.

    An answer with another status than 200 or 206 is read as by `SendRequest`.

    Attributes:
        start: the first byte that the request asks for.
        tag: the ``ETag`` of what came, also if it did not come whole.
    """

    call: SendRequest
    sink: BinaryIO
    start: int = 0
    tag: str = ""

    def begin(self, headers: Mapping[str, str]) -> None:
        """Set `sink` to where the answer's bytes begin; raises `ConnectionLost` if that is neither 0 nor `start`."""
        first, _ = range_of(headers)
        if first not in (0, self.start):
            raise ConnectionLost(f"asked for bytes from {self.start}, the server sends them from {first}", True)
        self.tag = headers.get("etag", "")
        self.sink.seek(first)


@dataclass(frozen=True)
class OpenStream:
    """Send a request and leave its answer open; the `HttpResponse` has an empty body if the status is 200."""

    call: SendRequest


@dataclass(frozen=True)
class ReadChunk:
    """The next bytes of the answer that is open; None at its end."""


@dataclass(frozen=True)
class EmitValue:
    """Hand `value` to whoever iterates."""

    value: Any


@dataclass(frozen=True)
class Sleep:
    """Wait."""

    seconds: float


class HttpResponse(NamedTuple):
    """An answer; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""


class ConnectionLost(Exception):
    """There was no whole answer.

    Attributes:
        sent: whether the server may have seen the request.
    """

    def __init__(self, why: str, sent: bool) -> None:
        self.why, self.sent = why, sent
        super().__init__(why)


Effect = SendRequest | DownloadBody | OpenStream | ReadChunk | EmitValue | Sleep


def range_of(headers: Mapping[str, str]) -> tuple[int, int | None]:
    """(first byte, bytes of the whole) that an answer carries; the second is None if it does not say.

    Raises:
        Lost: for a ``Content-Range`` that makes no sense.
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
        raise ConnectionLost(f"the server sent a strange Content-Range {text[:80]!r}", True)
    return int(first), int(total) if total.isdigit() else None
