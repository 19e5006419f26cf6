"""`AsyncClient`, over httpx."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
from collections.abc import AsyncIterator
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from vllm_weir.client import admin
from vllm_weir.client.concurrency import Progress, async_run_in_order
from vllm_weir.client.errors import NotFound, ServerError, error_from
from vllm_weir.client.http import ClientOptions, ConnectionLost, Download, HttpRequest, transport_errors
from vllm_weir.client.payload import CHAT, NOTHING, GenerationCall, chat_batch, prompt_batch, route_and_prompt
from vllm_weir.client.response_fields import activations_of
from vllm_weir.client.results import Choice, Chunk, Completion, completion_of
from vllm_weir.client.sse import EventParser, StreamAssembler
from vllm_weir.errors import WeirError
from vllm_weir.schema.request import MEASURE_DOSE, WIRE_KEY
from vllm_weir.util.atomic_write import atomic_write

_logger = logging.getLogger(__name__)


class AsyncClient:
    """An asyncio client of a ``weir serve`` server.

    An instance belongs to the event loop that first uses it.
    Its ``async with`` block, or `close`, closes the connections.

    Args:
        base_url: The server's address, with or without ``/v1``.
        api_key: vLLM's ``--api-key``, if the server has one.
        admin_key: The server's ``WEIR_ADMIN_KEY``, needed to change the server for every request.
        model: The model (or adapter) to ask for; by default the one that the server serves.
        timeout: Seconds without a byte after which a request is abandoned.
        retries: Further attempts after a failure. A generation is repeated only if it never began.
        transport: An ``httpx.AsyncBaseTransport``, for tests and proxies.

    Raises:
        WeirError: If a request is wrong (``field`` says where). All other failures are its
            subclasses `AuthError`, `NotFound`, `TooLarge` and `ServerError`.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        admin_key: str | None = None,
        model: str | None = None,
        timeout: float = 600.0,
        retries: int = 2,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._options = ClientOptions.parse(base_url, api_key, admin_key, timeout, retries)
        self._http = httpx.AsyncClient(
            base_url=self._options.root,
            headers=self._options.headers,
            timeout=httpx.Timeout(timeout, connect=min(timeout, 30.0)),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=self._options.keepalive),
            transport=transport,
        )
        self._model = model
        self._model_lock = asyncio.Lock()
        self.vectors: admin.VectorAdmin = admin.VectorAdmin(self._call)
        self.saes: admin.SAEAdmin = admin.SAEAdmin(self._call)
        self.probes: admin.ProbeAdmin = admin.ProbeAdmin(self._call)
        self.hooks: admin.HookAdmin = admin.HookAdmin(self._call)
        self.lenses: admin.LensAdmin = admin.LensAdmin(self._call)
        self.steering: admin.SteeringAdmin = admin.SteeringAdmin(self._call)

    async def model(self) -> str:
        """Return the model that requests ask for."""
        return await self._default_model()

    async def generate(
        self,
        prompt: Any,
        *,
        max_tokens: int = 16,
        capture: Any = (),
        interventions: Any = (),
        modules: Any = (),
        features: Any = (),
        lens: Any = None,
        probes: Any = (),
        stop_when: Any = (),
        dose: bool = MEASURE_DOSE,
        hooks: Any = (),
        tag: str = "",
        routing: Any = None,
        inline_bytes: int | None = None,
        save_to: str | PathLike | None = None,
        concurrency: int = 32,
        progress: Progress = None,
        **fields: Any,
    ) -> Any:
        """Continue a text (``/v1/completions``).

        Args:
            prompt: A text, a list of token ids, or a list of either.
            max_tokens: The most tokens to generate.
            capture: What to capture, as for `weir.params`: objects, or their wire form.
            interventions: What to change, as for `weir.params`: objects, or their wire form.
            modules: Names (or ``{"name", "scale"}``) of modules that the server keeps; they act
                before `interventions`.
            features: Features of autoencoders to read, as for `weir.params`.
            lens: A lens to read, as for `weir.params`; over HTTP a fitted lens is named.
            probes: What scores the sequence, as for `weir.params`: objects, or names of probes that
                the server keeps.
            stop_when: Scores that end the generation, as for `weir.params`: ``"name > 0.9"``.
            dose: Whether to measure how much the interventions change the rows, as for
                `weir.params`.
            hooks: Functions that the server has loaded, each a `Use` (or its name, or its wire
                form); what they give comes as ``values`` and ``saved``. A client sends no code.
            tag: A text that comes back as ``completion.receipt.tag``, as for `weir.params`.
            routing: Whether the experts that routers choose come back as ``completion.routed_experts``, as for
                `weir.params`.
            inline_bytes: Activations up to this size come within the response; larger ones are
                fetched after it.
            save_to: A directory. Activations are streamed into files there (``choice.path``) and
                read on first access instead of being held in memory.
            concurrency: The most requests in flight, for a list of prompts.
            progress: True shows a progress bar; a function is called with (finished, total).
            fields: OpenAI's and vLLM's own fields: ``temperature``, ``n``, ``model``, ``logprobs``,
                ``extra_body``, ...

        Returns:
            A `Completion`; for a list of prompts, a list of them in the same order.
        """
        asked = NOTHING.asking(
            capture=capture, interventions=interventions, modules=modules, features=features, lens=lens, probes=probes,
            stop_when=stop_when, dose=dose, hooks=hooks, tag=tag, routing=routing,
        )  # fmt: skip
        call = GenerationCall.create(asked, inline_bytes, save_to, fields | {"max_tokens": max_tokens})
        return await self._generate_all(prompt, prompt_batch(prompt), call, concurrency, progress)

    async def chat(
        self,
        messages: Any,
        *,
        max_tokens: int = 16,
        capture: Any = (),
        interventions: Any = (),
        modules: Any = (),
        features: Any = (),
        lens: Any = None,
        probes: Any = (),
        stop_when: Any = (),
        dose: bool = MEASURE_DOSE,
        hooks: Any = (),
        tag: str = "",
        routing: Any = None,
        inline_bytes: int | None = None,
        save_to: str | PathLike | None = None,
        concurrency: int = 32,
        progress: Progress = None,
        **fields: Any,
    ) -> Any:
        """Answer a conversation (``/v1/chat/completions``) or a list of them, like `generate`."""
        asked = NOTHING.asking(
            capture=capture, interventions=interventions, modules=modules, features=features, lens=lens, probes=probes,
            stop_when=stop_when, dose=dose, hooks=hooks, tag=tag, routing=routing,
        )  # fmt: skip
        call = GenerationCall.create(asked, inline_bytes, save_to, fields | {"max_tokens": max_tokens})
        return await self._generate_all(messages, chat_batch(messages), call, concurrency, progress)

    def stream(
        self,
        prompt: Any,
        *,
        max_tokens: int = 16,
        capture: Any = (),
        interventions: Any = (),
        modules: Any = (),
        features: Any = (),
        lens: Any = None,
        probes: Any = (),
        stop_when: Any = (),
        dose: bool = MEASURE_DOSE,
        hooks: Any = (),
        tag: str = "",
        routing: Any = None,
        inline_bytes: int | None = None,
        save_to: str | PathLike | None = None,
        **fields: Any,
    ) -> AsyncIterator[Chunk]:
        """Iterate over a generation's chunks with ``async for``, of a prompt or of chat messages.

        The arguments are those of `generate`. Scores and values come with the tokens that they belong to;
        activations come at the end, in the last chunk's ``result``.
        """
        asked = NOTHING.asking(
            capture=capture, interventions=interventions, modules=modules, features=features, lens=lens, probes=probes,
            stop_when=stop_when, dose=dose, hooks=hooks, tag=tag, routing=routing,
        )  # fmt: skip
        call = GenerationCall.create(asked, inline_bytes, save_to, fields | {"max_tokens": max_tokens})
        route_and_prompt(prompt)  # a wrong prompt is refused here, not by the first iteration
        return self._stream(call, prompt)

    async def collect(self, completion: Completion) -> None:
        """Fetch the activations of `completion` that are on the server, and free them there."""
        await self._collect(completion, None)

    async def info(self) -> dict[str, Any]:
        """Return what the server serves: model, layers, width, hook points, limits and version."""
        return await self._call("GET", "/v1/weir/info")

    async def mark(self, answer: str | Completion | Chunk, **metadata: Any) -> dict[str, Any]:
        """Have rows captured with ``keep="marked"`` written to their sink, like `weir.mark`.

        Args:
            answer: What `generate` or `chat` returned, its ``id``, or a chunk of `stream`. All its
                sequences are marked.
            metadata: Plain JSON data that the sink stores with the rows.

        Returns:
            ``{"id", "sinks": [{"sink", "state"}], "gone": [reasons]}``, with one ticket for each
            finished sequence and sink. Sequences that are still generated have none; their rows are
            written when they end.

        Raises:
            NotFound: If no such request is known, or its rows are gone.
        """
        return await self._call("POST", "/v1/marks", json=admin.mark_body(answer, metadata), repeatable=False)

    async def load_adapter(self, name: str, path: str | PathLike | None = None) -> None:
        """Have the server load a LoRA adapter unless it has it; use it with ``model=name``.

        Args:
            name: The adapter's name.
            path: Its directory, as the server sees it.

        Raises:
            WeirError: If the server neither has the adapter nor can load it.
        """
        models = await self._call("GET", "/v1/models")
        if name in {m.get("id") for m in models.get("data", ())}:
            return
        if path is None:
            raise WeirError(f"the server has no adapter {name!r}; give its path", "path")
        body = {"lora_name": name, "lora_path": fspath(path)}
        try:
            await self._request(HttpRequest("POST", "/v1/load_lora_adapter", json=body, repeatable=False))
        except NotFound as e:
            if e.message not in ("Not Found", "HTTP status 404"):  # the route exists: no such adapter
                raise WeirError(e.message, "path") from None
            raise WeirError(
                f"the server cannot load the adapter {name!r}: start it with --enable-lora and the environment "
                "variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or with --lora-modules",
                "name",
            ) from None

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _default_model(self) -> str:
        """Return the model that the server serves, adapters aside."""
        async with self._model_lock:
            if self._model is None:
                data = await self._call("GET", "/v1/models")
                models = [m for m in data.get("data", ()) if not m.get("parent")] if isinstance(data, dict) else []
                if not models:
                    raise NotFound("the server lists no model", "model", 404)
                self._model = models[0]["id"]
            return self._model

    async def _model_for(self, call: GenerationCall) -> str:
        return call.fields.get("model") or await self._default_model()

    async def _generate_all(
        self, prompt: Any, batch: list[Any] | None, call: GenerationCall, concurrency: int, progress: Progress
    ) -> Any:
        """Generate for `prompt`, or for every prompt of `batch` if there is one."""
        if batch is None:
            return await self._generate(call, prompt, await self._model_for(call))
        if not batch:
            return []
        model = await self._model_for(call)
        generations = [partial(self._generate, call, one, model) for one in batch]
        return await async_run_in_order(generations, concurrency, progress)

    async def _generate(self, call: GenerationCall, prompt: Any, model: str) -> Completion:
        request = call.http_request(prompt, model, stream=False)
        data = await self._request_json(request)
        if not isinstance(data, dict) or not data.get("choices"):
            raise ServerError("the server's response has no choices")
        completion = completion_of(data, chat=request.path == CHAT, asks_weir=WIRE_KEY in request.json)
        await self._collect(completion, call.save_to)
        return completion

    async def _stream(self, call: GenerationCall, prompt: Any) -> AsyncIterator[Chunk]:
        request = call.http_request(prompt, await self._model_for(call), stream=True)
        response = await self._send(request, stream=True)
        parser, assembler = EventParser(), StreamAssembler(request.path == CHAT, WIRE_KEY in request.json)
        try:
            with transport_errors():
                if response.status_code != 200:
                    raise error_from(response.status_code, await response.aread())
                async for data in response.aiter_bytes():
                    for event in parser.feed(data):
                        for chunk in assembler.add(event):
                            yield chunk
                    if assembler.done:
                        break
        except ConnectionLost as lost:
            raise ServerError(f"the stream broke: {lost.why}") from None
        finally:
            await response.aclose()
        completion = assembler.result()
        await self._collect(completion, call.save_to)
        yield Chunk(result=completion)

    async def _collect(self, completion: Completion, save_to: Path | None) -> None:
        """Fetch the activations that are on the server and free them there; write `save_to`'s files."""
        for choice in completion.choices:
            rows = choice.projected if choice.rows is None else choice.rows
            if choice.reference is not None:
                await self._fetch_choice(choice, choice.reference, save_to)
            elif save_to is not None and rows is not None:
                name = f"{completion.id or 'activations'}-{choice.index}.safetensors"
                choice.path = rows.save(save_to / name.replace(os.sep, "_"))

    async def _fetch_choice(self, choice: Choice, reference: str, save_to: Path | None) -> None:
        route = f"/v1/activations/{reference}"
        if save_to is None:
            memory = io.BytesIO()
            await self._fetch(route, memory)
            choice.rows = activations_of(memory.getvalue())
        else:
            path = save_to / f"{reference}.safetensors"
            with atomic_write(path) as file:
                await self._fetch(route, file)
            choice.path = path
        choice.reference = None
        try:
            await self._call("DELETE", route)
        except NotFound:
            return
        except WeirError as e:
            _logger.warning("could not free %s on the server, where it will expire: %s", route, e)

    async def _fetch(self, path: str, sink: BinaryIO) -> None:
        """Download a result into `sink`, until too many attempts in a row have brought nothing new.

        Raises:
            NotFound: If the result has expired.
            ServerError: If it cannot be downloaded whole.
        """
        download, retries = Download(path, sink), self._options.retries
        while not download.complete:
            if download.fruitless > retries.most:
                raise ServerError(f"could not download {path}: {download.why}")
            if download.fruitless:
                await asyncio.sleep(retries.wait(download.fruitless))
            try:
                await self._fetch_once(download)
            except ConnectionLost as lost:
                download.stopped(lost.why)

    async def _fetch_once(self, download: Download) -> None:
        response = await self._send_once(download.request(), stream=True)
        try:
            if download.begin(response):
                with transport_errors():
                    async for data in response.aiter_bytes():
                        download.sink.write(data)
                download.end()
        finally:
            await response.aclose()

    async def _call(self, method: str, path: str, **options: Any) -> Any:
        return await self._request_json(HttpRequest(method, path, **options))

    async def _request_json(self, request: HttpRequest) -> Any:
        """Return a response's JSON data, None if it is empty; raise the error that it reports."""
        body = await self._request(request)
        if not body.strip():
            return None
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise ServerError(f"the response to {request.path} is not JSON") from None

    async def _request(self, request: HttpRequest) -> bytes:
        """Return a response's body; raise the error that it reports."""
        response = await self._send(request)
        if not response.is_success:
            raise error_from(response.status_code, response.content)
        return response.content

    async def _send(self, request: HttpRequest, stream: bool = False) -> httpx.Response:
        """Send a request, again after failures that allow it, and return the last response.

        Raises:
            ServerError: If the last attempt got no response.
        """
        retries, attempt = self._options.retries, 1
        while True:
            try:
                response = await self._send_once(request, stream)
            except ConnectionLost as lost:
                pause = retries.after_loss(attempt, request, lost)
            else:
                again = retries.after_response(attempt, request, response)
                if again is None:
                    return response
                pause = again
            await asyncio.sleep(pause)
            attempt += 1

    async def _send_once(self, request: HttpRequest, stream: bool = False) -> httpx.Response:
        """Return the response; one with status 200 or 206 has its body still to come if `stream`."""
        built = self._http.build_request(**self._options.arguments(request))
        with transport_errors():
            response = await self._http.send(built, stream=stream)
            if stream and response.status_code not in (200, 206):
                try:
                    await response.aread()
                finally:
                    await response.aclose()
        return response
