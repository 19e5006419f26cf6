"""The clients' flows, without I/O: generators that yield effects (`vllm_weir.client.effects`)."""

from __future__ import annotations

import io
import json
import logging
import os
import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from vllm_weir.client.effects import (
    ConnectionLost,
    DownloadBody,
    Effect,
    EmitValue,
    HttpResponse,
    OpenStream,
    ReadChunk,
    SendRequest,
    Sleep,
    content_range,
)
from vllm_weir.client.errors import NotFound, ServerError, error_from
from vllm_weir.client.payload import CHAT, Asked, body_of, route_and_prompt
from vllm_weir.client.response_fields import activations_of
from vllm_weir.client.results import Choice, Chunk, Completion, completion_of
from vllm_weir.client.sse import EventParser, StreamAssembler
from vllm_weir.errors import WeirError
from vllm_weir.schema.request import WIRE_KEY
from vllm_weir.util.atomic_write import atomic_write

T = TypeVar("T")
Flow = Generator[Effect, Any, T]
_logger = logging.getLogger(__name__)

NOT_STARTED = (429, 503)
"""Statuses of requests that the server has not begun to process."""
TRANSIENT = (429, 500, 502, 503, 504)
"""Statuses after which another attempt may succeed."""


@dataclass(frozen=True)
class RetryPolicy:
    """When to try again, and after how long.

    Attributes:
        most: Further attempts after the first.
        base: Seconds before the first of them, doubled for each later one; up to half is added at
            random.
        longest: The most seconds before an attempt, without the random part.
        chance: Returns a random number from 0 to 1.
    """

    most: int = 2
    base: float = 0.5
    longest: float = 8.0
    chance: Callable[[], float] = random.random

    def wait(self, attempt: int, headers: Mapping[str, str] | None = None) -> Sleep:
        """Return the pause before further attempt number `attempt` (from 1).

        A server's ``Retry-After`` takes precedence, up to a minute.
        """
        retry_after = (headers or {}).get("retry-after", "")
        if retry_after.isdigit():
            return Sleep(min(float(retry_after), 60.0))
        delay = min(self.base * 2 ** (attempt - 1), self.longest)
        return Sleep(delay * (1 + self.chance() / 2))


def send(effect: SendRequest | OpenStream, retries: RetryPolicy) -> Flow[HttpResponse]:
    """Send a request, again after failures that allow it, and return the last response.

    A request that is not repeatable is not sent again once the server may have begun to process it.

    Raises:
        ServerError: If the last attempt got no response.
    """
    request = effect if isinstance(effect, SendRequest) else effect.request
    for attempt in range(1, retries.most + 2):
        last = attempt == retries.most + 1
        try:
            response = yield effect
        except ConnectionLost as lost:
            if last or (lost.sent and not request.repeatable):
                raise ServerError(f"{request.method} {request.path}: {lost.why}") from None
            yield retries.wait(attempt)
            continue
        if last or response.status not in (TRANSIENT if request.repeatable else NOT_STARTED):
            return response
        yield retries.wait(attempt, response.headers)
    raise AssertionError("unreachable")


def request_bytes(request: SendRequest, retries: RetryPolicy) -> Flow[bytes]:
    """Return a response's body; raise the error that it reports."""
    response = yield from send(request, retries)
    if not 200 <= response.status < 300:
        raise error_from(response.status, response.body)
    return response.body


def request_json(request: SendRequest, retries: RetryPolicy) -> Flow[Any]:
    """Return a response's JSON data, None if it is empty; raise the error that it reports."""
    body = yield from request_bytes(request, retries)
    if not body.strip():
        return None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ServerError(f"the response to {request.path} is not JSON") from None


def load_adapter(name: str, path: str | None, retries: RetryPolicy) -> Flow[None]:
    """Have the server load a LoRA adapter if it does not have it; it is then a model of that name.

    Raises:
        WeirError: If the server neither has the adapter nor can load it.
    """
    models = yield from request_json(SendRequest("GET", "/v1/models"), retries)
    if name in {m.get("id") for m in models.get("data", ())}:
        return
    if path is None:
        raise WeirError(f"the server has no adapter {name!r}; give its path", "path")
    body = {"lora_name": name, "lora_path": path}
    try:
        yield from request_bytes(SendRequest("POST", "/v1/load_lora_adapter", json=body, repeatable=False), retries)
    except NotFound as e:
        if e.message not in ("Not Found", "HTTP status 404"):  # the route exists: no such adapter
            raise WeirError(e.message, "path") from None
        raise WeirError(
            f"the server cannot load the adapter {name!r}: start it with --enable-lora and the environment variable "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or with --lora-modules",
            "name",
        ) from None


def find_model(retries: RetryPolicy) -> Flow[str]:
    """Return the name of the model that the server serves, adapters aside."""
    data = yield from request_json(SendRequest("GET", "/v1/models"), retries)
    models = [m for m in data.get("data", ()) if not m.get("parent")] if isinstance(data, dict) else []
    if not models:
        raise NotFound("the server lists no model", "model", 404)
    return models[0]["id"]


@dataclass(frozen=True)
class GenerationRequest:
    """One generation, as the caller asked for it.

    Attributes:
        prompt: A text, token ids, or chat messages.
        asked: What it asks of Weir.
        inline_bytes: Activations up to this size come within the response.
        fields: OpenAI's and vLLM's own fields.
        save_to: The directory for the activations, or None to hold them in memory.
    """

    prompt: Any
    asked: Asked
    inline_bytes: int | None
    fields: Mapping[str, Any]
    save_to: Path | None = None

    def http_request(self, model: str, stream: bool) -> SendRequest:
        """Return the HTTP request."""
        path, prompt = route_and_prompt(self.prompt)
        body = body_of(
            prompt,
            self.fields.get("model") or model,
            asked=self.asked,
            inline_bytes=self.inline_bytes,
            stream=stream,
            fields={name: value for name, value in self.fields.items() if name != "model"},
        )
        return SendRequest("POST", path, json=body, repeatable=False)


def generate(generation: GenerationRequest, model: str, retries: RetryPolicy) -> Flow[Completion]:
    """Generate, and fetch the activations that are kept on the server."""
    request = generation.http_request(model, stream=False)
    data = yield from request_json(request, retries)
    if not isinstance(data, dict) or not data.get("choices"):
        raise ServerError("the server's response has no choices")
    completion = completion_of(data, chat=request.path == CHAT, asks_weir=WIRE_KEY in request.json)
    yield from collect(completion, generation.save_to, retries)
    return completion


def stream(generation: GenerationRequest, model: str, retries: RetryPolicy) -> Flow[None]:
    """Emit every `Chunk` of a streamed generation, the last one with the whole result."""
    request = generation.http_request(model, stream=True)
    response = yield from send(OpenStream(request), retries)
    if response.status != 200:
        raise error_from(response.status, response.body)
    parser, assembler = EventParser(), StreamAssembler(request.path == CHAT, WIRE_KEY in request.json)
    while not assembler.done:
        try:
            data = yield ReadChunk()
        except ConnectionLost as lost:
            raise ServerError(f"the stream broke: {lost.why}") from None
        if data is None:
            break
        for event in parser.feed(data):
            for chunk in assembler.add(event):
                yield EmitValue(chunk)
    completion = assembler.result()
    yield from collect(completion, generation.save_to, retries)
    yield EmitValue(Chunk(result=completion))


def collect(completion: Completion, save_to: Path | None, retries: RetryPolicy) -> Flow[None]:
    """Fetch the activations that are on the server and free them there; write `save_to`'s files."""
    for choice in completion.choices:
        rows = choice.projected if choice.rows is None else choice.rows
        if choice.reference is not None:
            yield from _fetch_choice(choice, save_to, retries)
        elif save_to is not None and rows is not None:
            name = f"{completion.id or 'activations'}-{choice.index}.safetensors"
            choice.path = rows.save(save_to / name.replace(os.sep, "_"))


def _fetch_choice(choice: Choice, save_to: Path | None, retries: RetryPolicy) -> Flow[None]:
    reference = choice.reference
    assert reference is not None
    if save_to is None:
        memory = io.BytesIO()
        yield from fetch(reference, memory, retries)
        choice.rows = activations_of(memory.getvalue())
    else:
        path = save_to / f"{reference}.safetensors"
        with atomic_write(path) as file:
            yield from fetch(reference, file, retries)
        choice.path = path
    choice.reference = None
    yield from free(reference, retries)


def result_path(reference: str) -> str:
    """Return the path of a result on the server."""
    return f"/v1/activations/{reference}"


def fetch(reference: str, sink: BinaryIO, retries: RetryPolicy) -> Flow[int]:
    """Download a result into `sink`, resuming after breaks, and return its size in bytes.

    The download is abandoned after more than ``retries.most`` attempts in a row that bring nothing
    new.

    Raises:
        NotFound: If the result has expired.
        ServerError: If it cannot be downloaded whole.
    """
    received, total, tag, fruitless = 0, None, "", 0
    why = "nothing was received"
    while fruitless <= retries.most:
        if fruitless:
            yield retries.wait(fruitless)
        headers = {"Accept-Encoding": "identity"}
        if received:
            headers["Range"] = f"bytes={received}-"
            if tag:
                headers["If-Range"] = tag
        effect = DownloadBody(SendRequest("GET", result_path(reference), headers=headers), sink, received)
        before = received
        try:
            response = yield effect
        except ConnectionLost as lost:
            received, why, tag = sink.tell(), lost.why, effect.tag or tag
            fruitless = 0 if received > before else fruitless + 1
            continue
        if response.status in TRANSIENT:
            fruitless, why = fruitless + 1, f"HTTP status {response.status}"
            continue
        if response.status == 416 and received:
            # The file has fewer bytes than were received, so it is another one: start again.
            received = 0
            sink.seek(0)
            fruitless, why = fruitless + 1, "the result changed on the server"
            continue
        if response.status not in (200, 206):
            raise error_from(response.status, response.body)
        first, total = content_range(response.headers)
        received, tag = sink.tell(), effect.tag or tag
        if total is None or received == total:
            sink.truncate(received)
            return received
        fruitless = 0 if received > max(before, first) else fruitless + 1
        why = f"received {received} of {total} bytes"
    raise ServerError(f"could not download {result_path(reference)}: {why}")


def free(reference: str, retries: RetryPolicy) -> Flow[None]:
    """Delete a downloaded result on the server; it would expire, so a failure is only logged."""
    try:
        yield from request_json(SendRequest("DELETE", result_path(reference)), retries)
    except NotFound:
        return
    except WeirError as e:
        _logger.warning("could not free %s on the server, where it will expire: %s", result_path(reference), e)
