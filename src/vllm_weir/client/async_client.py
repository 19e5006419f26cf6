"""`AsyncClient`: carries out the flows of `vllm_weir.client.protocol` over httpx."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from os import PathLike, fspath
from typing import Any, TypeVar

import httpx

from vllm_weir.client import admin, protocol
from vllm_weir.client.concurrency import async_run_in_order
from vllm_weir.client.effects import (
    ConnectionLost,
    DownloadBody,
    Effect,
    EmitValue,
    OpenStream,
    ReadChunk,
    SendRequest,
    Sleep,
)
from vllm_weir.client.http import http_response, transport_errors
from vllm_weir.client.options import ClientOptions, Progress, RequestFields, generation_request
from vllm_weir.client.payload import Asked, chat_batch, prompt_batch, route_and_prompt
from vllm_weir.client.results import Chunk, Completion
from vllm_weir.schema.request import MEASURE_DOSE

T = TypeVar("T")


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
        self.vectors: admin.VectorAdmin = admin.VectorAdmin(self._request_json)
        self.saes: admin.SAEAdmin = admin.SAEAdmin(self._request_json)
        self.probes: admin.ProbeAdmin = admin.ProbeAdmin(self._request_json)
        self.hooks: admin.HookAdmin = admin.HookAdmin(self._request_json)
        self.lenses: admin.LensAdmin = admin.LensAdmin(self._request_json)
        self.steering: admin.SteeringAdmin = admin.SteeringAdmin(self._request_json)

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
        asked = Asked(capture, interventions, modules, features, lens, probes, stop_when, dose, hooks)
        weir_fields = RequestFields(asked, inline_bytes, save_to)
        fields = fields | {"max_tokens": max_tokens}
        return await self._generate_all(prompt, prompt_batch(prompt), weir_fields, fields, concurrency, progress)

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
        inline_bytes: int | None = None,
        save_to: str | PathLike | None = None,
        concurrency: int = 32,
        progress: Progress = None,
        **fields: Any,
    ) -> Any:
        """Answer a conversation (``/v1/chat/completions``) or a list of them, like `generate`."""
        asked = Asked(capture, interventions, modules, features, lens, probes, stop_when, dose, hooks)
        weir_fields = RequestFields(asked, inline_bytes, save_to)
        fields = fields | {"max_tokens": max_tokens}
        return await self._generate_all(messages, chat_batch(messages), weir_fields, fields, concurrency, progress)

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
        inline_bytes: int | None = None,
        save_to: str | PathLike | None = None,
        **fields: Any,
    ) -> AsyncIterator[Chunk]:
        """Iterate over a generation's chunks with ``async for``, of a prompt or of chat messages.

        The arguments are those of `generate`. Scores and values come with the tokens that they belong to;
        activations come at the end, in the last chunk's ``result``.
        """
        asked = Asked(capture, interventions, modules, features, lens, probes, stop_when, dose, hooks)
        weir_fields = RequestFields(asked, inline_bytes, save_to)
        generation = generation_request(prompt, weir_fields, fields | {"max_tokens": max_tokens})
        route_and_prompt(prompt)  # a wrong prompt is refused here, not by the first iteration
        return self._stream(generation)

    async def collect(self, completion: Completion) -> None:
        """Fetch the activations of `completion` that are on the server, and free them there."""
        await self._run(protocol.collect(completion, None, self._options.retries))

    async def info(self) -> dict[str, Any]:
        """Return what the server serves: model, layers, width, hook points, limits and version."""
        return await self._request_json(admin.INFO)

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
        return await self._request_json(admin.mark(answer, metadata))

    async def load_adapter(self, name: str, path: str | PathLike | None = None) -> None:
        """Have the server load a LoRA adapter unless it has it; use it with ``model=name``.

        Args:
            name: The adapter's name.
            path: Its directory, as the server sees it.
        """
        await self._run(protocol.load_adapter(name, None if path is None else fspath(path), self._options.retries))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _default_model(self) -> str:
        async with self._model_lock:
            if self._model is None:
                self._model = await self._run(protocol.find_model(self._options.retries))
        return self._model

    async def _model_for(self, fields: Any) -> str:
        return fields.get("model") or await self._default_model()

    async def _generate_all(
        self,
        prompt: Any,
        batch: list[Any] | None,
        weir_fields: RequestFields,
        fields: dict[str, Any],
        concurrency: int,
        progress: Progress,
    ) -> Any:
        """Generate for `prompt`, or for every prompt of `batch` if there is one."""
        prompts = [prompt] if batch is None else batch
        generations = [generation_request(one, weir_fields, fields) for one in prompts]
        model = await self._model_for(fields) if generations else ""
        calls = [partial(self._generate, generation, model) for generation in generations]
        if batch is None:
            return await calls[0]()
        return await async_run_in_order(calls, concurrency, progress)

    async def _generate(self, generation: protocol.GenerationRequest, model: str) -> Completion:
        return await self._run(protocol.generate(generation, model, self._options.retries))

    async def _request_json(self, request: SendRequest) -> Any:
        return await self._run(protocol.request_json(request, self._options.retries))

    async def _run(self, flow: protocol.Flow[T]) -> T:
        """Carry out a flow that emits nothing, and return its result."""
        try:
            effect = next(flow)
            while True:
                try:
                    result = await self._carry_out(effect)
                except ConnectionLost as lost:
                    effect = flow.throw(lost)
                else:
                    effect = flow.send(result)
        except StopIteration as end:
            return end.value
        finally:
            flow.close()

    async def _stream(self, generation: protocol.GenerationRequest) -> AsyncIterator[Chunk]:
        """Carry out the flow of a streamed generation, and yield what it emits."""
        model = await self._model_for(generation.fields)
        flow = protocol.stream(generation, model, self._options.retries)
        open_response = _OpenResponse(self)
        try:
            effect = next(flow)
            while True:
                try:
                    if isinstance(effect, EmitValue):
                        yield effect.value
                        result = None
                    else:
                        result = await open_response.carry_out(effect)
                except ConnectionLost as lost:
                    effect = flow.throw(lost)
                else:
                    effect = flow.send(result)
        except StopIteration:
            return
        finally:
            await open_response.close()
            flow.close()

    async def _carry_out(self, effect: Effect) -> Any:
        if isinstance(effect, Sleep):
            return await asyncio.sleep(effect.seconds)
        if isinstance(effect, SendRequest):
            response = await self._send(effect, stream=False)
            return http_response(response, response.content)
        assert isinstance(effect, DownloadBody)
        with transport_errors():
            response = await self._send(effect.request, stream=True)
            try:
                if response.status_code not in (200, 206):
                    return http_response(response, await response.aread())
                result = http_response(response)
                effect.begin(result.headers)
                async for data in response.aiter_bytes():
                    effect.sink.write(data)
                return result
            finally:
                await response.aclose()

    async def _send(self, request: SendRequest, stream: bool) -> httpx.Response:
        with transport_errors():
            return await self._http.send(self._http.build_request(**self._options.arguments(request)), stream=stream)


class _OpenResponse:
    """The one response that a stream leaves open between effects."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._response: httpx.Response | None = None
        self._bytes: AsyncIterator[bytes] | None = None

    async def carry_out(self, effect: Effect) -> Any:
        if isinstance(effect, OpenStream):
            self._response = await self._client._send(effect.request, stream=True)
            with transport_errors():
                if self._response.status_code != 200:
                    return http_response(self._response, await self._response.aread())
            self._bytes = self._response.aiter_bytes()
            return http_response(self._response)
        if isinstance(effect, ReadChunk):
            assert self._bytes is not None
            with transport_errors():
                return await anext(self._bytes, None)
        await self.close()
        return await self._client._carry_out(effect)

    async def close(self) -> None:
        if self._response is not None:
            await self._response.aclose()
