"""What the clients do, without I/O: generators that yield effects (`vllm_weir.client.effects`)."""

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
    range_of,
)
from vllm_weir.client.errors import NotFound, ServerError, error_of
from vllm_weir.client.payload import CHAT, about_of, body_of
from vllm_weir.client.results import Choice, Chunk, Completion, activations_of, completion_of
from vllm_weir.client.sse import EventParser, StreamAssembler
from vllm_weir.errors import WeirError
from vllm_weir.schema.request import WIRE_KEY

T = TypeVar("T")
Flow = Generator[Effect, Any, T]
_logger = logging.getLogger(__name__)

UNTOUCHED = (429, 503)
"""Statuses that say that the request was not worked on."""
PASSING = (429, 500, 502, 503, 504)
"""Statuses after which asking again may help."""


@dataclass(frozen=True)
class RetryPolicy:
    """When to try again, and after how long.

    Attributes:
        most: further attempts after the first.
        base: seconds before the first of them; doubled for each one after it, with up to half of it at random.
    """

    most: int = 2
    base: float = 0.5
    longest: float = 8.0
    chance: Callable[[], float] = random.random

    def wait(self, attempt: int, headers: Mapping[str, str] | None = None) -> Sleep:
        """Before attempt number `attempt` (from 1). A server's ``Retry-After`` counts, up to a minute."""
        asked = (headers or {}).get("retry-after", "")
        if asked.isdigit():
            return Sleep(min(float(asked), 60.0))
        delay = min(self.base * 2 ** (attempt - 1), self.longest)
        return Sleep(delay * (1 + self.chance() / 2))


def ask(effect: SendRequest | DownloadBody | OpenStream, retries: RetryPolicy) -> Flow[HttpResponse]:
    """Send it, and again after failures that allow that: never a request that changes or generates something, once
    the server may have begun with it.

    Raises:
        ServerError: if no attempt got an answer.
    """
    call = effect if isinstance(effect, SendRequest) else effect.call
    for attempt in range(1, retries.most + 2):
        last = attempt == retries.most + 1
        try:
            reply = yield effect
        except ConnectionLost as lost:
            if last or (lost.sent and not call.repeatable):
                raise ServerError(f"{call.method} {call.path}: {lost.why}") from None
            yield retries.wait(attempt)
            continue
        if last or reply.status not in (PASSING if call.repeatable else UNTOUCHED):
            return reply
        yield retries.wait(attempt, reply.headers)
    raise AssertionError("unreachable")


def bytes_of(call: SendRequest, retries: RetryPolicy) -> Flow[bytes]:
    """What a call answers; raises the error that it tells of."""
    reply = yield from ask(call, retries)
    if not 200 <= reply.status < 300:
        raise error_of(reply.status, reply.body)
    return reply.body


def data_of(call: SendRequest, retries: RetryPolicy) -> Flow[Any]:
    """The JSON data that a call answers (None for an empty answer); raises the error that it tells of."""
    body = yield from bytes_of(call, retries)
    if not body.strip():
        return None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ServerError(f"{call.path} answered something that is no JSON") from None


def load_adapter(name: str, path: str | None, retries: RetryPolicy) -> Flow[None]:
    """Have the server load a LoRA adapter, if it does not have it; afterwards it is a model of that name.

    Raises:
        WeirError: if it has none of that name and cannot load it.
    """
    found = yield from data_of(SendRequest("GET", "/v1/models"), retries)
    if name in {m.get("id") for m in found.get("data", ())}:
        return
    if path is None:
        raise WeirError(f"the server has no adapter {name!r}; say where it is", "path")
    call = SendRequest("POST", "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path}, repeatable=False)
    try:
        yield from bytes_of(call, retries)
    except NotFound as e:
        if e.message not in ("Not Found", "HTTP status 404"):  # there is such a route, and it says what is not there
            raise WeirError(e.message, "path") from None
        raise WeirError(
            f"the server loads no adapters, so not {name!r}: start it with --enable-lora and the environment variable "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or with --lora-modules",
            "name",
        ) from None


def find_model(retries: RetryPolicy) -> Flow[str]:
    """The model that the server serves; the first, if there are adapters besides."""
    found = yield from data_of(SendRequest("GET", "/v1/models"), retries)
    models = [m for m in found.get("data", ()) if not m.get("parent")] if isinstance(found, dict) else []
    if not models:
        raise NotFound("the server names no model", "model", 404)
    return models[0]["id"]


@dataclass(frozen=True)
class GenerationRequest:
    """One generation, as the caller asked for it.

    Attributes:
        prompt: a text, token ids, or chat messages.
        fields: OpenAI's and vLLM's own.
        save_to: a directory for the activations, or None for memory.
    """

    prompt: Any
    capture: Any
    interventions: Any
    modules: Any
    inline_bytes: int | None
    fields: Mapping[str, Any]
    save_to: Path | None = None

    def call(self, model: str, stream: bool) -> SendRequest:
        """The request."""
        path, about = about_of(self.prompt)
        body = body_of(
            about,
            self.fields.get("model") or model,
            capture=self.capture,
            interventions=self.interventions,
            modules=self.modules,
            inline_bytes=self.inline_bytes,
            stream=stream,
            fields={name: value for name, value in self.fields.items() if name != "model"},
        )
        return SendRequest("POST", path, json=body, repeatable=False)


def generate(asked: GenerationRequest, model: str, retries: RetryPolicy) -> Flow[Completion]:
    """One generation, and whatever of its results lies on the server."""
    call = asked.call(model, stream=False)
    data = yield from data_of(call, retries)
    if not isinstance(data, dict) or not data.get("choices"):
        raise ServerError("the server's answer has no choices")
    completion = completion_of(data, chat=call.path == CHAT, asked=WIRE_KEY in call.json)
    yield from collect(completion, asked.save_to, retries)
    return completion


def stream(asked: GenerationRequest, model: str, retries: RetryPolicy) -> Flow[None]:
    """Emits every `Chunk`, the last one with the whole result."""
    call = asked.call(model, stream=True)
    reply = yield from ask(OpenStream(call), retries)
    if reply.status != 200:
        raise error_of(reply.status, reply.body)
    events, assembler = EventParser(), StreamAssembler(call.path == CHAT, WIRE_KEY in call.json)
    while not assembler.done:
        try:
            data = yield ReadChunk()
        except ConnectionLost as lost:
            raise ServerError(f"the stream broke: {lost.why}") from None
        if data is None:
            break
        for event in events.feed(data):
            for chunk in assembler.take(event):
                yield EmitValue(chunk)
    whole = assembler.result()
    yield from collect(whole, asked.save_to, retries)
    yield EmitValue(Chunk(result=whole))


def collect(completion: Completion, save_to: Path | None, retries: RetryPolicy) -> Flow[None]:
    """Fetch the activations that lie on the server, then free them there; write inline ones where files are wanted."""
    for choice in completion.choices:
        rows = choice.scores if choice.rows is None else choice.rows
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
        part = path.with_suffix(".part")
        try:
            with part.open("w+b") as file:
                yield from fetch(reference, file, retries)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        choice.path = path
    choice.reference = None
    yield from free(reference, retries)


def place(reference: str) -> str:
    """Path of a result on the server."""
    return f"/v1/activations/{reference}"


def fetch(reference: str, sink: BinaryIO, retries: RetryPolicy) -> Flow[int]:
    """Download a result into `sink`; a broken connection is taken up where it broke. Returns its bytes.

    Any number of breaks is allowed, as long as no more than ``retries.most`` in a row bring nothing new.

    Raises:
        NotFound: if it has expired.
        ServerError: if it cannot be had whole.
    """
    held, total, tag, idle = 0, None, "", 0
    why = "nothing came"
    while idle <= retries.most:
        if idle:
            yield retries.wait(idle)
        headers = {"Accept-Encoding": "identity"}
        if held:
            headers["Range"] = f"bytes={held}-"
            if tag:
                headers["If-Range"] = tag
        effect = DownloadBody(SendRequest("GET", place(reference), headers=headers), sink, held)
        before = held
        try:
            reply = yield effect
        except ConnectionLost as lost:
            held, why, tag = sink.tell(), lost.why, effect.tag or tag
            idle = 0 if held > before else idle + 1
            continue
        if reply.status in PASSING:
            idle, why = idle + 1, f"HTTP status {reply.status}"
            continue
        if reply.status == 416 and held:
            held = 0  # what is there has fewer bytes than we hold: not the same; from the start
            sink.seek(0)
            idle, why = idle + 1, "the result changed on the server"
            continue
        if reply.status not in (200, 206):
            raise error_of(reply.status, reply.body)
        first, total = range_of(reply.headers)
        held, tag = sink.tell(), effect.tag or tag
        if total is None or held == total:
            sink.truncate(held)
            return held
        idle = 0 if held > max(before, first) else idle + 1
        why = f"{held} of {total} bytes came"
    raise ServerError(f"could not download {place(reference)}: {why}")


def free(reference: str, retries: RetryPolicy) -> Flow[None]:
    """Let the server forget a result. It is here already and would expire there, so a failure is only logged."""
    try:
        yield from data_of(SendRequest("DELETE", place(reference)), retries)
    except NotFound:
        return
    except WeirError as e:
        _logger.warning("could not free %s on the server, where it will expire: %s", place(reference), e)
