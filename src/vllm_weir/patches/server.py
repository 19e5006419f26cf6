"""Wrappers in an API server: read what a body asks of Weir, add rows to responses and streams."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from vllm_weir.compat import http
from vllm_weir.errors import WeirError, brief
from vllm_weir.frontend.lookup import has_frontend, view_of
from vllm_weir.frontend.pacing import entry_of
from vllm_weir.frontend.receive.release import holding
from vllm_weir.guard.refuse import ROUTES
from vllm_weir.guard.refuse import pooling as pooling  # the table of patches refers to it here
from vllm_weir.guard.refuse import without_room as without_room  # the table of patches refers to it here
from vllm_weir.guard.request_errors import WeirFailure, WeirRequestError
from vllm_weir.schema.keys import FORK_LISTS, KEYS, LENS_KEYS, LORA_KEY, WIRE_KEY, asks, fork_fields, slip
from vllm_weir.server.context import SERVER, current_response, server_of
from vllm_weir.server.request import WeirRequest
from vllm_weir.server.response import ResponseBuilder
from vllm_weir.server.response_body import ROUTED
from vllm_weir.server.state import ServerState

if TYPE_CHECKING:
    from vllm_weir.patches.registry import PatchStatus


def init(original: Callable[..., Any], status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``OpenAIServingCompletion.__init__``: read the server's limits when it starts."""

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if status.refusal is None and has_frontend(self.engine_client):
            server_of(self.engine_client)

    return wrapper


def create(original: Callable[..., Any], status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``create_completion`` or ``create_chat_completion``: serve what the body asks of Weir.

    Subclasses, which translate requests of other APIs, keep the original behaviour: their responses
    cannot carry rows.
    """
    owner = original.__qualname__.partition(".")[0]

    async def wrapper(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        body = request.model_extra or {}
        lora = body.get(LORA_KEY)
        here: ServerState | None = getattr(self.engine_client, SERVER, None)
        asked = lora is not None or asks(request.vllm_xargs, body)
        if type(self).__name__ != owner or not (asked or (here is not None and here.by_default is not None)):
            return await _plain(here, original(self, request, *args, **kwargs))
        if lacks_key(kwargs.get("raw_request", args[0] if args else None)):
            if not asked:  # vLLM serves it, and nothing is written for whom the operator does not know
                return await _plain(here, original(self, request, *args, **kwargs))
            field = LORA_KEY if lora is not None else WIRE_KEY
            return self.create_error_response(f"{field}: {NO_KEY}", "Unauthorized", HTTPStatus.UNAUTHORIZED, field)
        weir_request = None
        try:
            if status.serving_refusal is not None:
                raise WeirError(status.serving_refusal, WIRE_KEY)
            if lora is not None and (problem := await _use_lora(self.models, request, lora)) is not None:
                return problem
            server = server_of(self.engine_client)
            weir_request = await _read(server, request, body)
            if weir_request is None:
                return await _plain(server, original(self, request, *args, **kwargs))
            await server.frontend.pacing.wait_to_enter()
            return await _respond(self, ResponseBuilder(weir_request, server), original(self, request, *args, **kwargs))
        except WeirFailure as e:
            return _server_error(self, e)
        except WeirError as e:
            observer = server_of(self.engine_client).frontend.observer if has_frontend(self.engine_client) else None
            if observer is not None and not isinstance(e, WeirRequestError):  # counted where it was raised
                observer.refused()
            as_sent = e if weir_request is None else weir_request.as_sent(e)
            return self.create_error_response(str(as_sent), param=as_sent.field or None)

    return wrapper


async def _read(server: ServerState, request: Any, body: Mapping[str, Any]) -> WeirRequest | None:
    """Return what a request asks of Weir, or what is done with a plain one; raise WeirError naming the field."""
    names = await http.known_names(server) if not fork_fields(body).keys().isdisjoint(FORK_LISTS) else None
    found = WeirRequest.parse(request.vllm_xargs, body, server.limits)
    if found is None:
        return None if server.by_default is None else server.by_default.request(request)
    found = http.translate(found, body, names, server.spool is not None)
    if request.use_beam_search:
        raise WeirError("is not served together with Weir's keys", "use_beam_search")
    return found


def serve_tokens(original: Callable[..., Any], status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``ServingTokens.serve_tokens``: serve what ``sampling_params.extra_args`` asks of Weir.

    Its streams, and subclasses with an answer of their own, cannot carry rows: those are refused where
    the request enters the engine.
    """
    owner = original.__qualname__.partition(".")[0]

    async def wrapper(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        params = request.sampling_params
        wish = (params.extra_args or {}).get(WIRE_KEY)
        if wish is None or request.stream or type(self).__name__ != owner or status.serving_refusal is not None:
            return await original(self, request, *args, **kwargs)
        try:
            server = server_of(self.engine_client)
            weir_request = WeirRequest.parse(None, {WIRE_KEY: wish}, server.limits)
            assert weir_request is not None
            params.extra_args = {**params.extra_args, **weir_request.extra_args}
            await server.frontend.pacing.wait_to_enter()
            builder = ResponseBuilder(weir_request, server)
            return await _respond(self, builder, _with_room(builder, original(self, request, *args, **kwargs)))
        except WeirFailure as e:
            return _server_error(self, e)
        except WeirError as e:
            return self.create_error_response(str(e), param=e.field or None)

    return wrapper


async def _with_room(builder: ResponseBuilder, handled: Awaitable[Any]) -> Any:
    """Return the response that `handled` results in as one whose choices take further fields."""
    try:
        response = await handled
    except AssertionError:  # vLLM's, for a request that was refused and so has no output
        if builder.failure is None:
            raise
        raise builder.failure from None
    if not hasattr(response, "choices"):
        return response
    kinds: Any = type(response), type(response.choices[0])
    answer, choice = _open_models(*kinds)
    choices = [choice.model_construct(**dict(one)) for one in response.choices]
    return answer.model_construct(**{**dict(response), "choices": choices})


@functools.cache
def _open_models(response: Any, choice: Any) -> tuple[Any, Any]:
    """Return subclasses of vLLM's models whose choices have what vLLM does not know, in JSON, too."""
    from pydantic import ConfigDict, create_model

    open_choice: Any = type(
        choice.__name__, (choice,), {"model_config": ConfigDict(extra="allow"), "__module__": __name__}
    )
    return create_model(response.__name__, __base__=response, choices=(list[Any], ...)), open_choice


async def _plain(server: ServerState | None, handled: Awaitable[Any]) -> Any:
    """Return the response to a plain request; those with Weir's keys wait until it has entered the engine."""
    if server is None:
        return await handled
    entry = server.frontend.pacing.enter()
    token = entry_of.set(entry)
    try:
        return await handled
    finally:
        entry_of.reset(token)
        entry.leave()


async def _respond(serving: Any, builder: ResponseBuilder, handled: Awaitable[Any]) -> Any:
    """Return the response, or the stream, that `handled` results in, with Weir's part added."""
    token, holding_token = current_response.set(builder), holding.set(builder.held)
    result = None
    try:
        try:
            result = await handled
        finally:
            current_response.reset(token)
            holding.reset(holding_token)
        return await _finish(serving, builder, result)
    finally:
        if not inspect.isasyncgen(result):  # a stream releases them when it ends
            builder.release()


async def _finish(serving: Any, builder: ResponseBuilder, result: Any) -> Any:
    if inspect.isasyncgen(result):
        # Wait for the first event, so that a refusal is a response with its own status.
        first = await anext(result, None)
        if builder.failure is not None:
            await result.aclose()
            raise builder.failure
        return _prepend(first, result)
    if builder.failure is not None:
        raise builder.failure
    if not hasattr(result, "choices"):
        return result
    try:
        weir_objects = await builder.weir_objects()
    except WeirError as e:
        if e.field in LENS_KEYS:
            return serving.create_error_response(str(e), param=e.field)
        return _server_error(serving, e)
    for choice in result.choices:
        if choice.index in weir_objects:
            choice.weir = weir_objects[choice.index]
            if (routed := choice.weir.pop(ROUTED, None)) is not None:
                choice.routed_experts = routed  # not in every version a field that vLLM fills itself
    for name, value in builder.fields.items():
        setattr(result, name, {**(getattr(result, name, None) or {}), **value})
    return result


def _server_error(serving: Any, e: WeirError) -> Any:
    code = HTTPStatus.INTERNAL_SERVER_ERROR
    return serving.create_error_response(str(e), "InternalServerError", code, e.field or None)


async def _prepend(first: Any, rest: AsyncGenerator[Any, Any]) -> AsyncIterator[Any]:
    async with aclosing(rest):
        if first is not None:
            yield first
        async for chunk in rest:
            yield chunk


def to_sampling_params(original: Callable[..., Any], status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``to_sampling_params`` of a request model: add what the body asks of Weir to ``extra_args``."""

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        builder = current_response.get()
        if builder is None:
            if asks(None, self.model_extra):
                if (wrong := slip(None, self.model_extra)) is not None and status.serving_refusal is None:
                    raise WeirRequestError(wrong.message, wrong.field)
                why = status.serving_refusal or f"this route has no room for Weir's answers; use {ROUTES}"
                raise WeirRequestError(why, WIRE_KEY)
            return original(self, *args, **kwargs)
        params = original(self, *args, **kwargs)
        others = {k: v for k, v in (params.extra_args or {}).items() if k not in KEYS}
        params.extra_args = others | dict(builder.request.extra_args)
        return params

    return wrapper


def completion_response(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``request_output_to_completion_response``: collect the views of the outputs."""
    name = "final_res_batch"
    index = list(inspect.signature(original).parameters).index(name) - 1  # without self

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        builder = current_response.get()
        if builder is not None:
            results = kwargs[name] if name in kwargs else args[index]
            outputs = (output for result in results for output in result.outputs)
            for choice, output in enumerate(outputs):
                builder.add_view(choice, view_of(output))
        return original(self, *args, **kwargs)

    return wrapper


def chat_response(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Wrap ``chat_completion_full_generator``: collect the views of the outputs."""
    signature = inspect.signature(original)

    async def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        builder = current_response.get()
        if builder is None:
            return await original(self, *args, **kwargs)
        call = signature.bind(self, *args, **kwargs)
        call.arguments["result_generator"] = _collect_views(builder, call.arguments["result_generator"], 1)
        return await original(*call.args, **call.kwargs)

    return wrapper


def stream(original: Callable[..., Any], _status: PatchStatus) -> Callable[..., Any]:
    """Wrap a generator of server-sent events: collect the views of the outputs, and add rows to the events."""
    signature = inspect.signature(original)

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        builder = current_response.get()
        if builder is None:
            return original(self, *args, **kwargs)
        call = signature.bind(self, *args, **kwargs)
        n = call.arguments["request"].n or 1
        builder.several = n * call.arguments.get("num_prompts", 1) > 1  # the first choice may end before others begin
        call.arguments["result_generator"] = _collect_views(builder, call.arguments["result_generator"], n)
        return builder.rewrite(original(*call.args, **call.kwargs))

    return wrapper


async def _collect_views(builder: ResponseBuilder, results: AsyncGenerator[Any, Any], n: int) -> AsyncIterator[Any]:
    """Yield `results`, outputs or (prompt, output) pairs, with their views added to the builder."""
    begun = False
    try:
        async with aclosing(results):
            async for item in results:
                begun = True
                prompt, output = item if isinstance(item, tuple) else (0, item)
                for completion in output.outputs:
                    builder.add_view(completion.index + prompt * n, view_of(completion))
                yield item
    except WeirError as e:
        builder.failure, builder.failed = e, isinstance(e, WeirFailure)
        if begun:
            raise
        # Otherwise it is a refusal, which `create` makes a response of; raised here, vLLM would log
        # it as a failed stream.


async def _use_lora(models: Any, request: Any, lora: object) -> Any:
    """Make the request use the LoRA that ``lora_request`` names.

    Return an error response if vLLM cannot load it.

    A path is opened only where vLLM's own setting lets clients load LoRAs.
    """
    from vllm import envs

    name, path = _lora_fields(lora)
    if request.model not in (None, "", name) and not models.is_base_model(request.model):
        raise WeirError(f"names {brief(name)!r}, model names {brief(request.model)!r}", f"{LORA_KEY}.lora_name")
    loaded = models.lora_requests.get(name)
    if loaded is not None and path is not None and loaded.lora_path != path:
        raise WeirError(
            f"{brief(name)!r} is a LoRA of this server with another path; leave lora_path out to use it",
            f"{LORA_KEY}.lora_path",
        )
    if loaded is None and not envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
        have = ", ".join(models.lora_requests) or "none"
        raise WeirError(
            f"{brief(name)!r} is none of this server's LoRAs ({have}); its operator can add it with --lora-modules, or "
            "let clients load LoRAs with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
            f"{LORA_KEY}.lora_name",
        )
    if loaded is None and path is not None:
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


NO_KEY = (
    "this needs the server's API key, which vLLM does not ask for on this route; send it as Authorization: Bearer KEY"
)


def lacks_key(raw_request: Any) -> bool:
    """Return whether a server has API keys and Starlette's request, if a client sent one, carries none of them."""
    # A request that Ray Serve's ingress has handed on has no app.
    app = None if raw_request is None else raw_request.scope.get("app")
    for one in () if app is None else app.user_middleware:
        # Its module differs between versions.
        if one.cls.__name__ == "AuthenticationMiddleware" and one.cls.__module__.startswith("vllm."):
            return not one.cls(None, *one.args, **one.kwargs).verify_token(raw_request.headers)
    return False
