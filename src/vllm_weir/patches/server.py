"""Patches in an API server: what a body asks of Weir on its way in, rows on their way into responses and streams."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from vllm_weir.errors import WeirError
from vllm_weir.frontend.lookup import has_frontend, view_of
from vllm_weir.frontend.pacing import entry_of
from vllm_weir.frontend.receive.release import holding
from vllm_weir.guard.refuse import ROUTES
from vllm_weir.guard.refuse import without_room as without_room  # held from here by the table
from vllm_weir.guard.request_errors import WeirFailure, WeirRequestError
from vllm_weir.schema.keys import KEYS, LENS_CAPTURE_KEY, LORA_KEY, WIRE_KEY, asks, slip
from vllm_weir.server.context import SERVER, current_response, server_of
from vllm_weir.server.request import WeirRequest
from vllm_weir.server.response import ResponseBuilder
from vllm_weir.server.state import ServerState

if TYPE_CHECKING:
    from vllm_weir.patches.registry import PatchStatus


def init(original: Callable[..., Any], status: PatchStatus) -> Callable[..., Any]:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if status.refusal is None and has_frontend(self.engine_client):
            server_of(self.engine_client)

    return wrapper


def create(original: Callable[..., Any], status: PatchStatus) -> Callable[..., Any]:
    """Of ``create_completion`` and ``create_chat_completion``. Classes that turn another API's requests into chats
    inherit it and have no room for what Weir adds: theirs are left as they are."""
    owner = original.__qualname__.partition(".")[0]

    async def wrapper(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        body = request.model_extra or {}
        lora = body.get(LORA_KEY)
        if type(self).__name__ != owner or (lora is None and not asks(request.vllm_xargs, body)):
            return await _plain(getattr(self.engine_client, SERVER, None), original(self, request, *args, **kwargs))
        ask = None
        try:
            if status.serving_refusal is not None:
                raise WeirError(status.serving_refusal, WIRE_KEY)
            if lora is not None and (problem := await _use_lora(self.models, request, lora)) is not None:
                return problem
            server = server_of(self.engine_client)
            ask = WeirRequest.parse(request.vllm_xargs, body, server.limits)
            if ask is None:
                return await _plain(server, original(self, request, *args, **kwargs))
            if request.use_beam_search:
                raise WeirError("is not served together with Weir's keys", "use_beam_search")
            await server.frontend.pacing.admission()
            return await _replied(self, ResponseBuilder(ask, server), original(self, request, *args, **kwargs))
        except WeirFailure as e:
            return _failed(self, e)
        except WeirError as e:
            observer = server_of(self.engine_client).frontend.observer if has_frontend(self.engine_client) else None
            if observer is not None and not isinstance(e, WeirRequestError):  # those are counted where they are raised
                observer.refused()
            sent = e if ask is None else ask.as_sent(e)
            return self.create_error_response(str(sent), param=sent.field or None)

    return wrapper


async def _plain(server: ServerState | None, handled: Awaitable[Any]) -> Any:
    """What a request gets that asks nothing of Weir; until it is with the engine, others let it go first."""
    if server is None:
        return await handled
    entry = server.frontend.pacing.enter()
    token = entry_of.set(entry)
    try:
        return await handled
    finally:
        entry_of.reset(token)
        entry.leave()


async def _replied(serving: Any, reply: ResponseBuilder, handled: Awaitable[Any]) -> Any:
    """What `handled` comes to, with Weir's part in it."""
    token, held = current_response.set(reply), holding.set(reply.held)
    result = None
    try:
        try:
            result = await handled
        finally:
            current_response.reset(token)
            holding.reset(held)
        return await _finish(serving, reply, result)
    finally:
        if not inspect.isasyncgen(result):  # a stream does so when it ends
            reply.release()


async def _finish(serving: Any, reply: ResponseBuilder, result: Any) -> Any:
    if inspect.isasyncgen(result):
        # What the engine refuses is refused before the response has begun.
        first = await anext(result, None)
        if reply.failure is not None:
            await result.aclose()
            raise reply.failure
        return _from(first, result)
    if reply.failure is not None:
        raise reply.failure
    if not hasattr(result, "choices"):
        return result
    try:
        answers = await reply.weir_objects()
    except WeirError as e:
        if e.field == LENS_CAPTURE_KEY:
            return serving.create_error_response(str(e), param=e.field)
        return _failed(serving, e)
    for choice in result.choices:
        if choice.index in answers:
            choice.weir = answers[choice.index]
    if reply.lens is not None:
        result.activations = reply.lens
    return result


def _failed(serving: Any, e: WeirError) -> Any:
    code = HTTPStatus.INTERNAL_SERVER_ERROR
    return serving.create_error_response(str(e), "InternalServerError", code, e.field or None)


async def _from(first: Any, rest: AsyncGenerator[Any, Any]) -> AsyncIterator[Any]:
    async with aclosing(rest):
        if first is not None:
            yield first
        async for chunk in rest:
            yield chunk


def to_sampling_params(original: Callable[..., Any], status: PatchStatus) -> Callable[..., Any]:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        reply = current_response.get()
        if reply is None:
            if asks(None, self.model_extra):
                if (wrong := slip(None, self.model_extra)) is not None and status.serving_refusal is None:
                    raise WeirRequestError(wrong.message, wrong.field)
                why = status.serving_refusal or f"this route has no room for Weir's answers; use {ROUTES}"
                raise WeirRequestError(why, WIRE_KEY)
            return original(self, *args, **kwargs)
        params = original(self, *args, **kwargs)
        others = {k: v for k, v in (params.extra_args or {}).items() if k not in KEYS}
        params.extra_args = others | dict(reply.request.extra_args)
        return params

    return wrapper


def completion_response(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    name = "final_res_batch"
    place = list(inspect.signature(original).parameters).index(name) - 1

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        reply = current_response.get()
        if reply is not None:
            results = kwargs[name] if name in kwargs else args[place]
            outputs = (output for result in results for output in result.outputs)
            for choice, output in enumerate(outputs):
                reply.add_view(choice, view_of(output))
        return original(self, *args, **kwargs)

    return wrapper


def chat_response(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    signature = inspect.signature(original)

    async def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        reply = current_response.get()
        if reply is None:
            return await original(self, *args, **kwargs)
        call = signature.bind(self, *args, **kwargs)
        call.arguments["result_generator"] = _noted(reply, call.arguments["result_generator"], 1)
        return await original(*call.args, **call.kwargs)

    return wrapper


def stream(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Of the generators of server-sent events."""
    signature = inspect.signature(original)

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        reply = current_response.get()
        if reply is None:
            return original(self, *args, **kwargs)
        call = signature.bind(self, *args, **kwargs)
        n = call.arguments["request"].n or 1
        reply.several = n * call.arguments.get("num_prompts", 1) > 1  # before the first ends, others may not have begun
        call.arguments["result_generator"] = _noted(reply, call.arguments["result_generator"], n)
        return reply.rewrite(original(*call.args, **call.kwargs))

    return wrapper


async def _noted(reply: ResponseBuilder, results: AsyncGenerator[Any, Any], n: int) -> AsyncIterator[Any]:
    """`results`, outputs or (prompt, output) pairs, whose views `reply` has seen before they are used."""
    begun = False
    try:
        async with aclosing(results):
            async for item in results:
                begun = True
                prompt, output = item if isinstance(item, tuple) else (0, item)
                for completion in output.outputs:
                    reply.add_view(completion.index + prompt * n, view_of(completion))
                yield item
    except WeirError as e:
        reply.failure, reply.failed = e, isinstance(e, WeirFailure)
        if begun:
            raise
        # Otherwise a refusal, which `create` turns into its response; a stream would log it as an error of its own.


async def _use_lora(models: Any, request: Any, lora: object) -> Any:
    """Have the request use the LoRA that ``lora_request`` names; an error response if vLLM cannot load it.

    A path reaches the disk only where the operator lets clients load LoRAs, which is vLLM's own setting.
    """
    from vllm import envs

    name, path = _lora_fields(lora)
    if request.model not in (None, "", name) and not models.is_base_model(request.model):
        raise WeirError(f"names {name!r}, model names {request.model!r}", f"{LORA_KEY}.lora_name")
    known = models.lora_requests.get(name)
    if known is not None and path is not None and known.lora_path != path:
        raise WeirError(
            f"{name!r} is another LoRA of this server; leave lora_path out to use it", f"{LORA_KEY}.lora_path"
        )
    if known is None and not envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
        have = ", ".join(models.lora_requests) or "none"
        raise WeirError(
            f"{name!r} is none of this server's LoRAs ({have}); its operator names them with --lora-modules, or lets "
            "clients load their own with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
            f"{LORA_KEY}.lora_name",
        )
    if known is None and path is not None:
        load = inspect.signature(models.load_lora_adapter, eval_str=True).parameters["request"].annotation
        result = await models.load_lora_adapter(load(lora_name=name, lora_path=path))
        if not isinstance(result, str):
            return result
    request.model = name
    return None


def _lora_fields(lora: object) -> tuple[str, str | None]:
    if not isinstance(lora, Mapping):
        raise WeirError(f"expected an object, got {type(lora).__name__}", LORA_KEY)
    for key in lora:
        if key not in ("lora_name", "lora_int_id", "lora_path"):
            raise WeirError("unknown key; known are lora_name, lora_int_id, lora_path", f"{LORA_KEY}.{str(key)[:40]}")
    name, path = lora.get("lora_name"), lora.get("lora_path")
    if not isinstance(name, str) or not name:
        raise WeirError("expected the name of a LoRA", f"{LORA_KEY}.lora_name")
    if path is not None and not isinstance(path, str):
        raise WeirError("expected a string", f"{LORA_KEY}.lora_path")
    return name, path
