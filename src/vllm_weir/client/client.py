"""`WorkerProcess`: the flows, carried out by blocking calls."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from functools import partial
from os import PathLike, fspath
from typing import Any, TypeVar

import httpx

from vllm_weir.client import admin, protocol
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
)
from vllm_weir.client.options import ClientOptions, Progress, RequestFields, asked_of, counter
from vllm_weir.client.payload import about_of, conversations, several
from vllm_weir.client.results import Chunk, Completion

T = TypeVar("T")


class Client:
    """Talks to a ``weir serve`` server.

    Usable from several threads. Close it, or use it in a ``with`` block.

    Args:
        base_url: the server's address, with or without ``/v1``.
        api_key: vLLM's ``--api-key``, if the server has one.
        admin_key: the server's ``--weir-admin-key``, for what changes the server for everyone.
        model: the model (or adapter) to ask for; default: the one that the server serves.
        timeout: seconds without a byte after which a request is given up.
        retries: further attempts after failures. A generation is repeated only if it never began.
        transport: an ``httpx.BaseTransport``, for tests and proxies.

    Raises:
        WeirError: for requests that are wrong (``field`` says where); `AuthError`, `NotFound`, `TooLarge` and
            `ServerError`, which are WeirErrors too, for the rest.
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
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._options = ClientOptions.parse(base_url, api_key, admin_key, timeout, retries)
        self._http = httpx.Client(
            base_url=self._options.root,
            headers=self._options.headers,
            timeout=httpx.Timeout(timeout, connect=min(timeout, 30.0)),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=self._options.keepalive),
            transport=transport,
        )
        self._model = model
        self._finding = threading.Lock()
        self.vectors: admin.VectorAdmin = admin.VectorAdmin(self._tell)
        self.steering: admin.SteeringAdmin = admin.SteeringAdmin(self._tell)

    @property
    def model(self) -> str:
        """The model that is asked for."""
        with self._finding:
            if self._model is None:
                self._model = self._run(protocol.find_model(self._options.retries))
        return self._model

    def generate(
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
        """Continue a text (``/v1/completions``).

        Args:
            prompt: a text, a list of token ids, or a list of either.
            max_tokens: most tokens to generate.
            capture, interventions: as for `weir.params`: objects, or their wire form.
            modules: names (or ``{"name", "scale"}``) of modules that the server keeps; they act before `interventions`.
            inline_bytes: activations up to this size come within the answer, larger ones are fetched after it.
            save_to: a directory: activations are streamed into files there (``choice.path``) and read when they are
                looked at, instead of being held in memory.
            concurrency: requests at a time, of a list of prompts.
            progress: True shows a bar; or a function that is called with (done, all).
            fields: OpenAI's and vLLM's own fields: ``temperature``, ``n``, ``model``, ``logprobs``, ``extra_body``, ...

        Returns:
            A `Completion`; for a list of prompts a list of them, in the same order.
        """
        wish = RequestFields(capture, interventions, modules, inline_bytes, save_to)
        prompts = several(prompt)
        return self._each(prompt, prompts, wish, fields | {"max_tokens": max_tokens}, concurrency, progress)

    def chat(
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
        """Answer a conversation (``/v1/chat/completions``), or a list of them; else as `generate`."""
        wish = RequestFields(capture, interventions, modules, inline_bytes, save_to)
        chats = conversations(messages)
        return self._each(messages, chats, wish, fields | {"max_tokens": max_tokens}, concurrency, progress)

    def stream(
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
    ) -> Iterator[Chunk]:
        """As `generate` or, for messages, `chat`, in pieces as they are generated.

        Scores come with the tokens that they belong to, activations at the end: the last chunk's ``result``.
        """
        wish = RequestFields(capture, interventions, modules, inline_bytes, save_to)
        asked = asked_of(prompt, wish, fields | {"max_tokens": max_tokens})
        about_of(prompt)
        return self._emitted(protocol.stream(asked, self._model_for(fields), self._options.retries))

    def info(self) -> dict[str, Any]:
        """What the server serves: model, layers, width, hook points served and refused, limits, version."""
        return self._run(protocol.data_of(admin.INFO, self._options.retries))

    def mark(self, answer: str | Completion | Chunk, **metadata: Any) -> dict[str, Any]:
        """As `weir.mark`: have rows that were captured with ``keep="marked"`` written to their sink.

        Args:
            answer: what `generate` or `chat` gave, or its ``id``, or a chunk of `stream`; all its sequences are meant.
            metadata: plain JSON data that the sink keeps with the rows.

        Returns:
            ``{"id", "sinks": [{"sink", "state"}], "gone": [reasons]}``: a ticket for each sequence and sink; sequences
            that are still generated have none, theirs are written when they end.

        Raises:
            NotFound: if no such request is known, or its rows are gone.
        """
        return self._run(protocol.data_of(admin.mark(answer, metadata), self._options.retries))

    def load_adapter(self, name: str, path: str | PathLike | None = None) -> None:
        """Have the server load a LoRA adapter if it does not have it; ask for it with ``model=name``.

        Args:
            path: its directory, as the server sees it.
        """
        self._run(protocol.load_adapter(name, None if path is None else fspath(path), self._options.retries))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _model_for(self, fields: dict[str, Any]) -> str:
        return fields.get("model") or self.model

    def _each(
        self,
        one: Any,
        several: list[Any] | None,
        wish: RequestFields,
        fields: dict[str, Any],
        concurrency: int,
        progress: Progress,
    ) -> Any:
        prompts = [one] if several is None else several
        asked = [asked_of(p, wish, fields) for p in prompts]
        model = self._model_for(fields) if asked else ""
        calls = [partial(self._finish, a, model) for a in asked]
        if several is None:
            return calls[0]()
        return _in_order(calls, concurrency, progress)

    def _finish(self, asked: protocol.GenerationRequest, model: str) -> Completion:
        return self._run(protocol.generate(asked, model, self._options.retries))

    def _tell(self, call: SendRequest, read: Callable[[Any], Any]) -> Any:
        return read(self._run(protocol.data_of(call, self._options.retries)))

    def _run(self, doing: protocol.Flow[T]) -> T:
        """Carry out a flow that emits nothing."""
        try:
            effect = next(doing)
            while True:
                try:
                    answer = self._carry_out(effect)
                except ConnectionLost as lost:
                    effect = doing.throw(lost)
                else:
                    effect = doing.send(answer)
        except StopIteration as end:
            return end.value
        finally:
            doing.close()

    def _emitted(self, doing: protocol.Flow[None]) -> Iterator[Chunk]:
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
                        answer = line.carry_out(effect)
                except ConnectionLost as lost:
                    effect = doing.throw(lost)
                else:
                    effect = doing.send(answer)
        except StopIteration:
            return
        finally:
            line.close()
            doing.close()

    def _carry_out(self, effect: Effect) -> Any:
        if isinstance(effect, Sleep):
            return time.sleep(effect.seconds)
        if isinstance(effect, SendRequest):
            response = self._send(effect, stream=False)
            return reply_of(response, response.content)
        assert isinstance(effect, DownloadBody)
        with losses():
            response = self._send(effect.call, stream=True)
            try:
                if response.status_code not in (200, 206):
                    return reply_of(response, response.read())
                reply = reply_of(response)
                effect.begin(reply.headers)
                for data in response.iter_bytes():
                    effect.sink.write(data)
                return reply
            finally:
                response.close()

    def _send(self, call: SendRequest, stream: bool) -> httpx.Response:
        with losses():
            return self._http.send(self._http.build_request(**self._options.arguments(call)), stream=stream)


class _OpenResponse:
    """The one answer that a stream leaves open."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._response: httpx.Response | None = None
        self._bytes: Iterator[bytes] = iter(())

    def carry_out(self, effect: Effect) -> Any:
        if isinstance(effect, OpenStream):
            self._response = self._client._send(effect.call, stream=True)
            with losses():
                if self._response.status_code != 200:
                    return reply_of(self._response, self._response.read())
            self._bytes = self._response.iter_bytes()
            return reply_of(self._response)
        if isinstance(effect, ReadChunk):
            with losses():
                return next(self._bytes, None)
        self.close()
        return self._client._carry_out(effect)

    def close(self) -> None:
        if self._response is not None:
            self._response.close()


@contextlib.contextmanager
def losses() -> Iterator[None]:
    """httpx's failures, as flows know them."""
    try:
        yield
    except httpx.TransportError as error:
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        unsent = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))
        raise ConnectionLost(why, sent=not unsent) from error


def reply_of(response: httpx.Response, body: bytes = b"") -> HttpResponse:
    return HttpResponse(response.status_code, {k.lower(): v for k, v in response.headers.items()}, body)


def _in_order(calls: Sequence[Callable[[], Completion]], concurrency: int, progress: Progress) -> list[Completion]:
    """The results in the order of the calls; the first failure calls off those not begun and is raised."""
    stopped = threading.Event()

    def one(call: Callable[[], Completion]) -> Completion:
        if stopped.is_set():
            raise CancelledError
        try:
            return call()
        except BaseException:
            stopped.set()
            raise

    with counter(progress, len(calls)) as count, ThreadPoolExecutor(max(1, min(concurrency, len(calls) or 1))) as pool:
        futures = [pool.submit(one, call) for call in calls]
        for future in futures:
            future.add_done_callback(lambda f: None if f.cancelled() or f.exception() else count())
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        errors = [f.exception() for f in futures if f.done() and not f.cancelled()]
        for error in errors:
            if error is not None and not isinstance(error, CancelledError):
                raise error
        return [future.result() for future in futures]
