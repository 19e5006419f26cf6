"""What both clients are made with."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from vllm_weir.client.effects import SendRequest
from vllm_weir.client.protocol import GenerationRequest, RetryPolicy
from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.json_text import fits_header

Progress = bool | Callable[[int, int], None] | None


@dataclass(frozen=True)
class ClientOptions:
    """A client's settings."""

    root: str
    retries: RetryPolicy
    headers: Mapping[bytes, bytes] = field(repr=False)
    admin_key: bytes = field(repr=False)
    keepalive: float = 4.0  # servers close idle connections after 5 seconds; a request then sent could be lost

    @classmethod
    def parse(
        cls, base_url: str, api_key: str | None, admin_key: str | None, timeout: float, retries: int
    ) -> ClientOptions:
        """Raises WeirError naming the argument that is wrong."""
        parts = urlsplit(base_url if isinstance(base_url, str) else "")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise WeirError(f"expected an address like http://localhost:8000, got {brief(base_url)!r}", "base_url")
        if not isinstance(timeout, (int, float)) or not timeout > 0:
            raise WeirError(f"a positive number of seconds, got {brief(timeout)}", "timeout")
        if not isinstance(retries, int) or retries < 0:
            raise WeirError(f"a number of attempts, got {brief(retries)}", "retries")
        root = base_url.rstrip("/").removesuffix("/v1")
        headers = {b"Authorization": b"Bearer " + _key(api_key, "api_key")} if api_key else {}
        return cls(root, RetryPolicy(retries), headers, _key(admin_key, "admin_key") if admin_key else b"")

    def arguments(self, call: SendRequest) -> dict[str, Any]:
        """What httpx makes a request of; raises WeirError if the call needs a key that the client lacks, or cannot be
        written as JSON."""
        headers: dict[str, str | bytes] = dict(call.headers)
        if call.admin:
            if not self.admin_key:
                raise WeirError("this changes the server for everyone; give the client its admin_key", "admin_key")
            headers["X-Weir-Admin-Key"] = self.admin_key
        content = call.content
        if call.json is not None:
            headers["Content-Type"] = "application/json"
            content = _written(call.json)
        return {"method": call.method, "url": call.path, "content": content, "headers": headers}


def _key(key: object, name: str) -> bytes:
    """A key as a header carries it. Errors do not show it."""
    if not isinstance(key, str) or not fits_header(key):
        raise WeirError("a key is a line of text, without blanks or a line break around it", name)
    return key.encode("utf-8", "surrogateescape")


def _written(data: Any) -> bytes:
    try:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as e:
        raise WeirError(f"this request cannot be written as JSON: {e}") from None


class RequestFields(NamedTuple):
    """What is asked of Weir, as the caller wrote it."""

    capture: Any
    interventions: Any
    modules: Any
    inline_bytes: int | None
    save_to: str | PathLike | None


def asked_of(prompt: Any, wish: RequestFields, fields: Mapping[str, Any]) -> GenerationRequest:
    """One generation; its directory is made."""
    save_to = None
    if wish.save_to is not None:
        save_to = Path(wish.save_to)
        save_to.mkdir(parents=True, exist_ok=True)
    return GenerationRequest(prompt, wish.capture, wish.interventions, wish.modules, wish.inline_bytes, fields, save_to)


@contextlib.contextmanager
def counter(progress: Progress, total: int) -> Iterator[Callable[[], None]]:
    """A function to call for each thing that is done, from any thread."""
    lock, done = threading.Lock(), 0
    bar = None
    if progress is True:
        from rich.progress import Progress as Bar

        bar = Bar(transient=True)
        task = bar.add_task("requests", total=total)

    def count() -> None:
        nonlocal done
        with lock:
            done += 1
            if bar is not None:
                bar.update(task, completed=done)
            elif callable(progress):
                progress(done, total)

    with bar or contextlib.nullcontext():
        yield count
