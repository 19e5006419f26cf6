"""Settings of a client, and of one call of it."""

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
from vllm_weir.client.payload import Asked
from vllm_weir.client.protocol import GenerationRequest, RetryPolicy
from vllm_weir.errors import WeirError, brief
from vllm_weir.schema.json_text import fits_header

Progress = bool | Callable[[int, int], None] | None


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

    def arguments(self, request: SendRequest) -> dict[str, Any]:
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


class RequestFields(NamedTuple):
    """The arguments of a call that concern Weir, as the caller wrote them."""

    asked: Asked
    inline_bytes: int | None
    save_to: str | PathLike | None


def generation_request(prompt: Any, weir_fields: RequestFields, fields: Mapping[str, Any]) -> GenerationRequest:
    """Return one generation's request, with the directory of `save_to` created."""
    save_to = None
    if weir_fields.save_to is not None:
        save_to = Path(weir_fields.save_to)
        save_to.mkdir(parents=True, exist_ok=True)
    return GenerationRequest(prompt, weir_fields.asked, weir_fields.inline_bytes, fields, save_to)


@contextlib.contextmanager
def progress_counter(progress: Progress, total: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call, from any thread, for each request that has finished."""
    lock, finished = threading.Lock(), 0
    bar = None
    if progress is True:
        from rich.progress import Progress as Bar

        bar = Bar(transient=True)
        task = bar.add_task("requests", total=total)

    def count() -> None:
        nonlocal finished
        with lock:
            finished += 1
            if bar is not None:
                bar.update(task, completed=finished)
            elif callable(progress):
                progress(finished, total)

    with bar or contextlib.nullcontext():
        yield count
