"""What both clients share of HTTP: their settings, requests, failures, when they try again, and downloads."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import httpx

from vllm_weir.client.errors import ServerError, error_from
from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.fields import fits_header

NOT_STARTED = (429, 503)
"""Statuses of requests that the server has not begun to process."""
TRANSIENT = (429, 500, 502, 503, 504)
"""Statuses after which another attempt may succeed."""
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@dataclass(frozen=True)
class HttpRequest:
    """A request."""

    method: str
    path: str  # the path on the server
    json: Any = None  # the body as JSON data
    content: bytes | None = None  # the body as bytes, if `json` is None
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True  # whether sending the request twice does the same as sending it once
    admin: bool = False  # whether the request needs the admin key


class ConnectionLost(Exception):
    """No complete response was received.

    Attributes:
        why: The reason, for the user.
        sent: Whether the server may have seen the request.
    """

    def __init__(self, why: str, sent: bool) -> None:
        self.why, self.sent = why, sent
        super().__init__(why)


@contextlib.contextmanager
def transport_errors() -> Iterator[None]:
    """Raise `ConnectionLost` where httpx raises a transport error."""
    try:
        yield
    except httpx.TransportError as error:
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ConnectionLost(why, sent=not isinstance(error, _NEVER_SENT)) from error


@dataclass(frozen=True)
class RetryPolicy:
    """When to try again, and after how long."""

    most: int = 2  # Further attempts after the first
    base: float = 0.5  # Seconds before the first of them, doubled for each later one; up to half is added at random
    longest: float = 8.0  # the most seconds before an attempt, without the random part
    chance: Callable[[], float] = random.random  # Returns a random number from 0 to 1

    def wait(self, attempt: int, headers: Mapping[str, str] | None = None) -> float:
        """Return the seconds before further attempt number `attempt` (from 1).

        A server's ``Retry-After`` takes precedence, up to a minute.
        """
        retry_after = (headers or {}).get("retry-after", "")
        if retry_after.isdigit():
            return min(float(retry_after), 60.0)
        delay = min(self.base * 2 ** (attempt - 1), self.longest)
        return delay * (1 + self.chance() / 2)

    def after_response(self, attempt: int, request: HttpRequest, response: httpx.Response) -> float | None:
        """Return the seconds after which to send again what got this response; None if it is the answer."""
        failures = TRANSIENT if request.repeatable else NOT_STARTED
        if attempt > self.most or response.status_code not in failures:
            return None
        return self.wait(attempt, response.headers)

    def after_loss(self, attempt: int, request: HttpRequest, lost: ConnectionLost) -> float:
        """Return the seconds after which to send again what got no response; raise ServerError if not to.

        What is not repeatable is not sent again once the server may have begun to process it.
        """
        if attempt > self.most or (lost.sent and not request.repeatable):
            raise ServerError(f"{request.method} {request.path}: {lost.why}") from None
        return self.wait(attempt)


class Download:
    """A download that goes on where it broke off.

    Attributes:
        sink: What the body is written to.
        fruitless: How many attempts in a row have brought nothing new.
        why: What the last of them ended with.
        complete: Whether all is there.
    """

    def __init__(self, path: str, sink: BinaryIO) -> None:
        self.path, self.sink = path, sink
        self.fruitless, self.why, self.complete = 0, "nothing was received", False
        self._received = 0
        self._total: int | None = None
        self._tag = ""  # the response's ETag, known even if its body breaks off

    def request(self) -> HttpRequest:
        """Return the request for what is missing."""
        headers = {"Accept-Encoding": "identity"}
        if self._received:
            headers["Range"] = f"bytes={self._received}-"
            if self._tag:
                headers["If-Range"] = self._tag
        return HttpRequest("GET", self.path, headers=headers)

    def begin(self, response: httpx.Response) -> bool:
        """Return whether a response's body is to be written to `sink`, which stands at its first byte then.

        The body has been read already if the status is another than 200 or 206.

        Raises:
            ConnectionLost: If the body begins neither at 0 nor at what is missing.
            NotFound: If the result has expired.
        """
        status = response.status_code
        if status in TRANSIENT:
            self.stopped(f"HTTP status {status}")
            return False
        if status == 416 and self._received:
            # The file has fewer bytes than were received, so it is another one: start again.
            self._received = 0
            self.sink.seek(0)
            self.stopped("the result changed on the server")
            return False
        if status not in (200, 206):
            raise error_from(status, response.content)
        first, self._total = content_range(response.headers)
        if first not in (0, self._received):
            raise ConnectionLost(f"asked for bytes from {self._received}, the server sends them from {first}", True)
        self._tag = response.headers.get("etag", "") or self._tag
        self.sink.seek(first)
        return True

    def end(self) -> None:
        """Record that a response's body has been written to its end."""
        here = self.sink.tell()
        if self._total is None or here == self._total:
            self.sink.truncate(here)
            self.complete = True
        else:
            self.stopped(f"received {here} of {self._total} bytes")

    def stopped(self, why: str) -> None:
        """Record that an attempt ended early."""
        before, self._received = self._received, self.sink.tell()
        self.fruitless = 0 if self._received > before else self.fruitless + 1
        self.why = why


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


@dataclass(frozen=True)
class ClientOptions:
    """The settings of a client."""

    root: str
    retries: RetryPolicy
    headers: Mapping[bytes, bytes] = field(repr=False)
    admin_key: bytes = field(repr=False)
    keepalive: float = 4.0  # seconds; vLLM's server closes idle connections after 5

    @classmethod
    def parse(
        cls, base_url: str, api_key: str | None, admin_key: str | None, timeout: float, retries: int
    ) -> ClientOptions:
        """Return the settings for these arguments; raise WeirError naming a wrong one."""
        parts = urlsplit(base_url if isinstance(base_url, str) else "")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise WeirError(f"expected an address like http://localhost:8000, got {brief(base_url)!r}", "base_url")
        if not isinstance(timeout, (int, float)) or not timeout > 0:
            raise WeirError(f"expected a positive number of seconds, got {brief(timeout)}", "timeout")
        if not isinstance(retries, int) or retries < 0:
            raise WeirError(f"expected a number of attempts, at least 0, got {brief(retries)}", "retries")
        root = base_url.rstrip("/").removesuffix("/v1")
        headers = {b"Authorization": b"Bearer " + _encoded_key(api_key, "api_key")} if api_key else {}
        return cls(root, RetryPolicy(retries), headers, _encoded_key(admin_key, "admin_key") if admin_key else b"")

    def arguments(self, request: HttpRequest) -> dict[str, Any]:
        """Return the arguments of httpx's ``build_request``; raise WeirError without an admin key or JSON data."""
        headers: dict[str, str | bytes] = dict(request.headers)
        if request.admin:
            if not self.admin_key:
                raise WeirError(
                    "this call changes the server for every request; give the client an admin_key", "admin_key"
                )
            headers["X-Weir-Admin-Key"] = self.admin_key
        content = request.content
        if request.json is not None:
            headers["Content-Type"] = "application/json"
            content = _json_bytes(request.json)
        return {"method": request.method, "url": request.path, "content": content, "headers": headers}


def _encoded_key(key: object, name: str) -> bytes:
    """Return a key as the bytes of a header; errors do not show it."""
    if not isinstance(key, str) or not fits_header(key):
        raise WeirError("a key is one line of text without spaces or line breaks around it", name)
    return key.encode("utf-8", "surrogateescape")


def _json_bytes(data: Any) -> bytes:
    try:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as e:
        raise WeirError(f"this request cannot be written as JSON: {e}") from None
