"""`AsyncClient`: the flows, carried out by awaiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from os import PathLike, fspath
from typing import Any, TypeVar

import httpx

from vllm_weir.client import admin, protocol
from vllm_weir.client.client import losses, reply_of
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
from vllm_weir.client.options import ClientOptions, Progress, RequestFields, asked_of, counter
from vllm_weir.client.payload import about_of, conversations, several
from vllm_weir.client.results import Chunk, Completion

T = TypeVar("T")


class AsyncClient:
    """`vllm_weir.Client` for asyncio: the same methods and arguments, to be awaited; `stream` for ``async for``.

    Belongs to the event loop that first uses it. Close it, or use it in an ``async with`` block.
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
        self._finding = asyncio.Lock()
        self.vectors = admin.VectorAdmin(self._tell)
        self.steering = admin.SteeringAdmin(self._tell)

    async def model(self) -> str:
        """The model that is asked for."""
        async with self._finding:
            if self._model is None:
                self._model = await self._run(protocol.find_model(self._options.retries))
        return self._model

    async def generate(
        self,
        prompt: Any,
        *,
        max_tokens: int = 16,
        capture: Any = (),
        interventions: Any = (),
        modules: Any = (),
        inline_bytes: int | None = None,
        save_to: str | PathLike | None = None,
        concurrency: int = 32,
        progress: Progress = None,
        **fields: Any,
    ) -> Any:
        """As `WorkerProcess.generate`."""
        wish = RequestFields(capture, interventions, modules, inline_bytes, save_to)
        prompts = several(prompt)
        return await self._each(prompt, prompts, wish, fields | {"max_tokens": max_tokens}, concurrency, progress)

    async def chat(
        self,
        messages: Any,
        *,
        max_tokens: int = 16,
        capture: Any = (),
        interventions: Any = (),
        modules: Any = (),
        inline_bytes: int | None = None,
        save_to: str | PathLike | None = None,
        concurrency: int = 32,
        progress: Progress = None,
        **fields: Any,
    ) -> Any:
        """As `WorkerProcess.chat`."""
        wish = RequestFields(capture, interventions, modules, inline_bytes, save_to)
        chats = conversations(messages)
        fields = fields | {"max_tokens": max_tokens}
        return await self._each(messages, chats, wish, fields, concurrency, progress)

    async def stream(
        self,
        prompt: Any,
        *,
        max_tokens: int = 16,
        capture: Any = (),
        interventions: Any = (),
        modules: Any = (),
        inline_bytes: int | None = None,
        save_to: str | PathLike | None = None,
        **fields: Any,
    ) -> AsyncIterator[Chunk]:
        """As `WorkerProcess.stream`."""
        wish = RequestFields(capture, interventions, modules, inline_bytes, save_to)
        asked = asked_of(prompt, wish, fields | {"max_tokens": max_tokens})
        about_of(prompt)
        model = fields.get("model") or await self.model()
        emitted = self._emitted(protocol.stream(asked, model, self._options.retries))
        try:
            async for chunk in emitted:
                yield chunk
        finally:
            await emitted.aclose()

    async def collect(self, completion: Completion) -> None:
        """Fetch the activations of an answer that lie on the server, and free them there."""
        await self._run(protocol.collect(completion, None, self._options.retries))

    async def info(self) -> dict[str, Any]:
        """As `WorkerProcess.info`."""
        return await self._run(protocol.data_of(admin.INFO, self._options.retries))

    async def mark(self, answer: str | Completion | Chunk, **metadata: Any) -> dict[str, Any]:
        """As `WorkerProcess.mark`."""
        return await self._run(protocol.data_of(admin.mark(answer, metadata), self._options.retries))

    async def load_adapter(self, name: str, path: str | PathLike | None = None) -> None:
        """As `WorkerProcess.load_adapter`."""
        await self._run(protocol.load_adapter(name, None if path is None else fspath(path), self._options.retries))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _each(
        self,
        one: Any,
        several: list[Any] | None,
        wish: RequestFields,
        fields: dict[str, Any],
        concurrency: int,
        progress: Progress,
    ) -> Any:
        asked = [asked_of(p, wish, fields) for p in ([one] if several is None else several)]
        if not asked:
            return []
        model = fields.get("model") or await self.model()
        calls = [partial(self._finish, a, model) for a in asked]
        return await calls[0]() if several is None else await _in_order(calls, concurrency, progress)

    async def _finish(self, asked: protocol.GenerationRequest, model: str) -> Completion:
        return await self._run(protocol.generate(asked, model, self._options.retries))

    async def _tell(self, call: SendRequest, read: Callable[[Any], Any]) -> Any:
        return read(await self._run(protocol.data_of(call, self._options.retries)))

    async def _run(self, doing: protocol.Flow[T]) -> T:
        """Carry out a flow that emits nothing."""
        try:
            effect = next(doing)
            while True:
                try:
                    answer = await self._carry_out(effect)
                except ConnectionLost as lost:
                    effect = doing.throw(lost)
                else:
                    effect = doing.send(answer)
        except StopIteration as end:
            return end.value
        finally:
            doing.close()

    async def _emitted(self, doing: protocol.Flow[None]) -> AsyncGenerator[Any, None]:
        """Carry out a flow, and hand on what it emits."""
        line = _OpenResponse(self)
        try:
            effect = next(doing)
            while True:
                try:
                    if isinstance(effect, EmitValue):
                        yield effect.value
                        answer = None
                    else:
                        answer = await line.carry_out(effect)
                except ConnectionLost as lost:
                    effect = doing.throw(lost)
                else:
                    effect = doing.send(answer)
        except StopIteration:
            return
        finally:
            await line.close()
            doing.close()

    async def _carry_out(self, effect: Effect) -> Any:
        if isinstance(effect, Sleep):
            return await asyncio.sleep(effect.seconds)
        if isinstance(effect, SendRequest):
            response = await self._send(effect, stream=False)
            return reply_of(response, response.content)
        assert isinstance(effect, DownloadBody)
        with losses():
            response = await self._send(effect.call, stream=True)
            try:
                if response.status_code not in (200, 206):
                    return reply_of(response, await response.aread())
                reply = reply_of(response)
                effect.begin(reply.headers)
                async for data in response.aiter_bytes():
                    effect.sink.write(data)
                return reply
            finally:
                await response.aclose()

    async def _send(self, call: SendRequest, stream: bool) -> httpx.Response:
        with losses():
            return await self._http.send(self._http.build_request(**self._options.arguments(call)), stream=stream)


class _OpenResponse:
    """The one answer that a stream leaves open."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._response: httpx.Response | None = None
        self._bytes: AsyncIterator[bytes] | None = None

    async def carry_out(self, effect: Effect) -> Any:
        if isinstance(effect, OpenStream):
            self._response = await self._client._send(effect.call, stream=True)
            with losses():
                if self._response.status_code != 200:
                    return reply_of(self._response, await self._response.aread())
            self._bytes = self._response.aiter_bytes()
            return reply_of(self._response)
        if isinstance(effect, ReadChunk):
            assert self._bytes is not None
            with losses():
                return await anext(self._bytes, None)
        await self.close()
        return await self._client._carry_out(effect)

    async def close(self) -> None:
        if self._response is not None:
            await self._response.aclose()


async def _in_order(
    calls: Sequence[Callable[[], Awaitable[Completion]]], concurrency: int, progress: Progress
) -> list[Completion]:
    """The results in the order of the calls; the first failure calls off all others and is raised."""
    room = asyncio.Semaphore(max(1, concurrency))
    stopped = asyncio.Event()
    with counter(progress, len(calls)) as count:

        async def one(call: Callable[[], Awaitable[Completion]]) -> Completion:
            async with room:
                if stopped.is_set():
                    raise asyncio.CancelledError
                try:
                    result = await call()
                except BaseException:
                    stopped.set()
                    raise
            count()
            return result

        tasks = [asyncio.ensure_future(one(call)) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
