"""The guard: wrappers that refuse requests with Weir's keys where Weir does not work.

It needs only the standard library and vLLM's own modules, so it works where a package that Weir
needs is missing. Importing `vllm_weir` installs it, and so does vLLM when it loads the plugin;
`vllm_weir.patches.registry.install` then replaces its wrappers by Weir's own, or leaves them with
the reason.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Protocol

from vllm_weir.errors import WeirError
from vllm_weir.guard.import_hook import when_imported
from vllm_weir.guard.request_extras import extras_in, extras_of
from vllm_weir.schema.keys import LENS_KEYS, LORA_KEY, WIRE_KEY, asks, carries_keys, refuse_slips, slip

ROUTES = "/v1/completions and /v1/chat/completions"
_DISTRIBUTIONS = {"zmq": "pyzmq"}
"""Module -> its distribution, where their names differ."""
PLUGIN = "weir"
"""The plugin's name among ``vllm.general_plugins``."""


class Status(Protocol):
    """Whether Weir works in this process."""

    @property
    def refusal(self) -> str | None:
        """Why requests with Weir's keys are refused; None if they are served."""

    @property
    def serving_refusal(self) -> str | None:
        """Why requests over HTTP with Weir's keys are refused; None if they are served."""


class Failed:
    """The status of a process in which Weir could not load."""

    def __init__(self, why: str) -> None:
        self.refusal = self.serving_refusal = why


class NotLoaded:
    """The status of a process in which vLLM has not loaded the plugin, as it does before it makes an engine.

    Attributes:
        unguarded: why nothing guards this process, or None.
    """

    unguarded: str | None = None

    @property
    def refusal(self) -> str:
        """Why vLLM has not loaded the plugin, as far as the environment tells."""
        return left_out() or (
            "vLLM did not load Weir's plugin in this process; its log says why, or vllm-weir is not installed "
            "(pip install vllm-weir): `weir doctor` tells"
        )

    serving_refusal = refusal


NOT_LOADED = NotLoaded()


class Unguarded(RuntimeError):
    """The guard cannot be installed, so an engine must not start: it would ignore Weir's keys."""


def left_out() -> str | None:
    """Return what to tell a user whose environment keeps vLLM from loading Weir; None if it does not."""
    named = os.environ.get("VLLM_PLUGINS")
    if named is None or PLUGIN in named.split(","):
        return None
    return f"vLLM does not load Weir: VLLM_PLUGINS is {named!r} and leaves it out; add {PLUGIN}, or unset it"


def module_of(distribution: str) -> str:
    modules = {name: module for module, name in _DISTRIBUTIONS.items()}
    return modules.get(distribution, distribution)


def cause_of(e: BaseException) -> str:
    """Return a message about an exception that kept Weir from working, with what to do."""
    text = f"Weir could not load: {type(e).__name__}: {e}"
    missing = (e.name or "").partition(".")[0] if isinstance(e, ModuleNotFoundError) else ""
    if missing == "vllm_weir":
        advice = "the installation is damaged; run pip install --force-reinstall vllm-weir"
    elif missing and missing != "vllm":
        advice = f"install it (pip install {_DISTRIBUTIONS.get(missing, missing)}) and start again"
    else:
        advice = "run `weir doctor` to check everything that Weir needs"
    return f"{text}; {advice}"


def add_request(original: Any, status: Status) -> Any:
    """Wrap ``OutputProcessor.add_request``, through which every request enters an engine."""

    def wrapper(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if extras := extras_of(request):
            _check(extras, status)
        return original(self, request, *args, **kwargs)

    return wrapper


def beam_search(original: Any, status: Status) -> Any:
    """Wrap ``LLM.beam_search``, which passes over what its params carry."""

    def wrapper(self: Any, prompts: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if extras := extras_in(params):
            _check(extras, status)
        return original(self, prompts, params, *args, **kwargs)

    return wrapper


def pooling(original: Any, _status: Status | None) -> Any:
    """Wrap the handler of the routes of pooling, whose responses cannot carry rows, by reading the body itself."""

    async def wrapper(self: Any, request: Any, raw_request: Any = None, *args: Any, **kwargs: Any) -> Any:
        body = await raw_request.json() if raw_request is not None else {}
        if isinstance(body, Mapping):
            try:
                _refuse_in(request, body)
            except WeirError as e:
                from fastapi.responses import JSONResponse

                refused = self.create_error_response(str(e), param=e.field or None)
                return JSONResponse(refused.model_dump(), status_code=refused.error.code)
        return await original(self, request, raw_request, *args, **kwargs)

    return wrapper


def _refuse_in(request: Any, body: Mapping[str, Any]) -> None:
    """Raise WeirError if a body has a key of Weir's, or one that misspells it."""
    known = type(request).model_fields
    xargs = None if "vllm_xargs" in known else body.get("vllm_xargs")
    xargs = xargs if isinstance(xargs, Mapping) else None
    if (wrong := slip(xargs, {k: v for k, v in body.items() if k not in known})) is not None:
        raise wrong
    if asks(xargs, body):
        raise WeirError(f"this route does not support it; use {ROUTES}", WIRE_KEY)


def _check(extra_args: Mapping[str, Any], status: Status) -> None:
    from vllm_weir.guard.request_errors import WeirRequestError

    if "vllm_lens._activations_plugin" in sys.modules:  # it serves its own keys, where Weir does not
        extra_args = {key: value for key, value in extra_args.items() if key not in LENS_KEYS}
    if carries_keys(extra_args):
        raise WeirRequestError(_why(status.refusal), WIRE_KEY)
    try:
        refuse_slips(extra_args)
    except WeirError as e:
        raise WeirRequestError(e.message, e.field) from None


def create(original: Any, status: Status) -> Any:
    """Wrap ``create_completion`` or ``create_chat_completion``."""

    async def wrapper(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        xargs, body = request.vllm_xargs, request.model_extra or {}
        if body.get(LORA_KEY) is not None or asks(xargs, body):
            error = WeirError(_why(status.serving_refusal), WIRE_KEY)
            return self.create_error_response(str(error), param=error.field)
        return await original(self, request, *args, **kwargs)

    return wrapper


def to_sampling_params(original: Any, status: Status) -> Any:
    """Wrap ``to_sampling_params`` of a request model."""

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if asks(self.vllm_xargs, self.model_extra):
            from vllm_weir.guard.request_errors import WeirRequestError

            raise WeirRequestError(_why(status.serving_refusal), WIRE_KEY)
        return original(self, *args, **kwargs)

    return wrapper


def without_room(original: Any, _status: Status | None) -> Any:
    """Wrap the handler of a route that ignores unknown fields, by reading the body itself."""

    async def wrapper(self: Any, request: Any, raw_request: Any = None, *args: Any, **kwargs: Any) -> Any:
        body = {} if raw_request is None else await raw_request.json()
        try:
            _refuse_in(request, body)
            return await original(self, request, raw_request, *args, **kwargs)
        except WeirError as e:
            return self.create_error_response(str(e), param=e.field or None)

    return wrapper


def init_device(original: Any, status: Status) -> Any:
    """Wrap ``WorkerWrapperBase.init_device``: the worker reports why it does not serve Weir's keys."""

    def wrapper(self: Any) -> None:
        original(self)
        self.worker.weir_report = functools.partial(_report, status)

    return wrapper


def _report(status: Status) -> dict[str, Any]:
    return {"ok": False, "reason": _why(status.refusal)}


def _why(refusal: str | None) -> str:
    return refusal or "Weir does not work in this process; see `weir doctor`"


_V1, _OPENAI, _GENERATE = "vllm.v1", "vllm.entrypoints.openai", "vllm.entrypoints.generate"
REQUESTS = f"{_V1}.engine.output_processor:OutputProcessor.add_request"
"""The path of the patch without which nothing is guarded."""
GUARDS: dict[str, Callable[[Any, Any], Any]] = {
    REQUESTS: add_request,
    "vllm.entrypoints.llm:LLM.beam_search": beam_search,
    f"{_V1}.worker.worker_base:WorkerWrapperBase.init_device": init_device,
    f"{_OPENAI}.completion.serving:OpenAIServingCompletion.create_completion": create,
    f"{_OPENAI}.completion.protocol:CompletionRequest.to_sampling_params": to_sampling_params,
    f"{_OPENAI}.chat_completion.serving:OpenAIServingChat.create_chat_completion": create,
    f"{_OPENAI}.chat_completion.protocol:ChatCompletionRequest.to_sampling_params": to_sampling_params,
    f"{_OPENAI}.responses.protocol:ResponsesRequest.to_sampling_params": to_sampling_params,
    "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.create_messages": without_room,
    "vllm.entrypoints.pooling.base.serving:PoolingBaseServing.__call__": pooling,
    f"{_GENERATE}.generative_scoring.serving:ServingGenerativeScoring.create_generative_scoring": without_room,
    f"{_GENERATE}.structured_decisions.serving:ServingStructuredDecisions.create_decision": without_room,
}
"""Path of a guarded patch of `vllm_weir.patches.registry` -> the function that makes its guarding
wrapper."""


def install(status: Status = NOT_LOADED) -> None:
    """Guard this process: wrap each entry of `GUARDS` as soon as its module is imported.

    Args:
        status: why Weir does not work. The default is for a process in which Weir may still be
            loaded; it leaves alone what is wrapped already.

    Raises:
        Unguarded: here or when a module is imported, if this vLLM lacks what is to be wrapped.
    """
    for path in GUARDS:
        when_imported(path.partition(":")[0], functools.partial(_apply, path, status))


def _apply(path: str, status: Status, module: ModuleType) -> None:
    owner_name, _, attribute = path.partition(":")[2].rpartition(".")
    try:
        owner = getattr(module, owner_name)
        found = getattr(owner, attribute)
    except AttributeError as e:
        if status is NOT_LOADED:  # the plugin or `weir.params` reports it
            if path == REQUESTS:
                NOT_LOADED.unguarded = f"Weir cannot guard this vLLM: {path}: {e}"
            return
        raise Unguarded(f"Weir cannot guard this vLLM: {path}: {e}. {status.refusal}") from None
    if status is not NOT_LOADED or not (hasattr(found, "__weir__") or hasattr(found, "__weir_guarded__")):
        setattr(owner, attribute, guarded(path, unguarded(found), status))


def refuse_because_of(e: Exception) -> None:
    """Refuse requests with Weir's keys because of an exception, and log it."""
    import logging

    why = cause_of(e)
    logging.getLogger(__name__).error("requests with Weir's keys are refused: %s", why, exc_info=e)
    install(Failed(why))


def guarded(path: str, original: Any, status: Status) -> Any:
    wrapper: Any = functools.wraps(original)(GUARDS[path](original, status))
    wrapper.__weir_guarded__, wrapper.__weir_status__ = original, status
    return wrapper


def unguarded(found: Any) -> Any:
    return getattr(found, "__weir_guarded__", found)


def refusal_here() -> str | None:
    """Return why this process refuses requests with Weir's keys; None if it does not.

    Also None before vLLM has imported an engine's modules, when that is not known.
    """
    module = sys.modules.get(REQUESTS.partition(":")[0])
    if module is None or getattr(module.__spec__, "_initializing", False):
        return None
    current = getattr(getattr(module, "OutputProcessor", None), "add_request", None)
    status = getattr(current, "__weir_status__", None)
    return NOT_LOADED.unguarded if status is None else status.refusal


def retry_next_time() -> None:
    """Make vLLM load its plugins again before its next engine.

    vLLM counts a plugin that raised as loaded, so a second engine in this process would start
    without a guard.
    """
    plugins: Any = importlib.import_module("vllm.plugins")
    if hasattr(plugins, "plugins_loaded"):
        plugins.plugins_loaded = False
