"""The guard: where Weir does not work, requests with its keys are refused with the cause, never run without them.

It needs the standard library and vLLM's own modules, so it holds where something that Weir needs is missing. Importing
`vllm_weir` puts it into a process, as vLLM does when it loads the plugin; `vllm_weir.patches.registry.install` then
takes its places, or leaves it there with the reason.
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
from vllm_weir.schema.keys import LORA_KEY, WIRE_KEY, asks, carries_keys, refuse_slips, slip

ROUTES = "/v1/completions and /v1/chat/completions"
_DISTRIBUTIONS = {"zmq": "pyzmq"}
"""Modules whose distribution has another name."""
_NAME = "weir"
"""The plugin's name."""


class Status(Protocol):
    """Whether Weir works in this process."""

    @property
    def refusal(self) -> str | None:
        """Why requests with Weir's keys are refused; None if they are served."""

    @property
    def serving_refusal(self) -> str | None:
        """Likewise, of requests over HTTP."""


class Failed:
    """Weir does not work in this process."""

    def __init__(self, why: str) -> None:
        self.refusal = self.serving_refusal = why


class NotLoaded:
    """vLLM has not loaded the plugin, which it does before it makes an engine.

    Attributes:
        unheld: why nothing guards this process, or None.
    """

    unheld: str | None = None

    @property
    def refusal(self) -> str:
        """Why, as far as the environment tells."""
        return left_out() or (
            "vLLM did not load Weir's plugin in this process; its log says why, or vllm-weir is not installed "
            "(pip install vllm-weir): `weir doctor` tells"
        )

    serving_refusal = refusal


NOT_LOADED = NotLoaded()


class Unguarded(RuntimeError):
    """Not even the guard can be held. An engine must not start: it would run requests and pass over Weir's keys."""


def left_out() -> str | None:
    """What to say of an environment that keeps vLLM from loading Weir; None if it does not."""
    named = os.environ.get("VLLM_PLUGINS")
    if named is None or _NAME in named.split(","):
        return None
    return f"vLLM does not load Weir: VLLM_PLUGINS is {named!r} and leaves it out; add {_NAME}, or unset it"


def module_of(distribution: str) -> str:
    """What to import of a package that Weir declares."""
    names = {name: module for module, name in _DISTRIBUTIONS.items()}
    return names.get(distribution, distribution)


def cause_of(e: BaseException) -> str:
    """What to tell a user of an exception that kept Weir from working, and what to do about it."""
    text = f"Weir could not load: {type(e).__name__}: {e}"
    missing = (e.name or "").partition(".")[0] if isinstance(e, ModuleNotFoundError) else ""
    if missing == "vllm_weir":
        advice = "the installation is damaged; run pip install --force-reinstall vllm-weir"
    elif missing and missing != "vllm":
        advice = f"install it (pip install {_DISTRIBUTIONS.get(missing, missing)}) and start again"
    else:
        advice = "`weir doctor` looks at everything that Weir needs"
    return f"{text}; {advice}"


def add_request(original: Any, status: Status) -> Any:
    """Of ``OutputProcessor.add_request``, which every request passes on its way into an engine."""

    def wrapper(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        params = request.sampling_params
        if params is not None and params.extra_args:
            _check(params.extra_args, status)
        return original(self, request, *args, **kwargs)

    return wrapper


def _check(extra_args: Mapping[str, Any], status: Status) -> None:
    from vllm_weir.guard.request_errors import WeirRequestError

    if carries_keys(extra_args):
        raise WeirRequestError(_why(status.refusal), WIRE_KEY)
    try:
        refuse_slips(extra_args)
    except WeirError as e:
        raise WeirRequestError(e.message, e.field) from None


def create(original: Any, status: Status) -> Any:
    """Of ``create_completion`` and ``create_chat_completion``."""

    async def wrapper(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        xargs, body = request.vllm_xargs, request.model_extra or {}
        if body.get(LORA_KEY) is not None or asks(xargs, body):
            error = WeirError(_why(status.serving_refusal), WIRE_KEY)
            return self.create_error_response(str(error), param=error.field)
        return await original(self, request, *args, **kwargs)

    return wrapper


def to_sampling_params(original: Any, status: Status) -> Any:
    """Of the request models that become SamplingParams."""

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if asks(self.vllm_xargs, self.model_extra):
            from vllm_weir.guard.request_errors import WeirRequestError

            raise WeirRequestError(_why(status.serving_refusal), WIRE_KEY)
        return original(self, *args, **kwargs)

    return wrapper


def without_room(original: Any, _status: Status | None) -> Any:
    """Of routes that pass over fields that they do not know: these are read off the body itself."""

    async def wrapper(self: Any, request: Any, raw_request: Any = None, *args: Any, **kwargs: Any) -> Any:
        known = type(request).model_fields
        body = {} if raw_request is None else await raw_request.json()
        xargs = None if "vllm_xargs" in known else body.get("vllm_xargs")
        xargs = xargs if isinstance(xargs, Mapping) else None
        try:
            if (wrong := slip(xargs, {k: v for k, v in body.items() if k not in known})) is not None:
                raise wrong
            if asks(xargs, body):
                raise WeirError(f"this route does not take it; use {ROUTES}", WIRE_KEY)
            return await original(self, request, raw_request, *args, **kwargs)
        except WeirError as e:
            return self.create_error_response(str(e), param=e.field or None)

    return wrapper


def init_device(original: Any, status: Status) -> Any:
    """Of ``WorkerWrapperBase.init_device``: the worker tells the caller's process why it does not serve it."""

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
"""Without this one nothing is guarded."""
GUARDS: dict[str, Callable[[Any, Any], Any]] = {
    REQUESTS: add_request,
    f"{_V1}.worker.worker_base:WorkerWrapperBase.init_device": init_device,
    f"{_OPENAI}.completion.serving:OpenAIServingCompletion.create_completion": create,
    f"{_OPENAI}.completion.protocol:CompletionRequest.to_sampling_params": to_sampling_params,
    f"{_OPENAI}.chat_completion.serving:OpenAIServingChat.create_chat_completion": create,
    f"{_OPENAI}.chat_completion.protocol:ChatCompletionRequest.to_sampling_params": to_sampling_params,
    f"{_OPENAI}.responses.protocol:ResponsesRequest.to_sampling_params": to_sampling_params,
    "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.create_messages": without_room,
    f"{_GENERATE}.generative_scoring.serving:ServingGenerativeScoring.create_generative_scoring": without_room,
    f"{_GENERATE}.structured_decisions.serving:ServingStructuredDecisions.create_decision": without_room,
}
"""What is guarded: the path of a patch of `vllm_weir.patches.registry` -> the maker of its wrapper."""


def hold(status: Status = NOT_LOADED) -> None:
    """Guard this process, each place as soon as its module is imported.

    Args:
        status: why Weir does not work. The default is for a process in which it may be loaded yet, and leaves what is
            held already as it is.

    Raises:
        Unguarded: here or when a module is imported, if a place cannot be held.
    """
    for path in GUARDS:
        when_imported(path.partition(":")[0], functools.partial(_hold, path, status))


def _hold(path: str, status: Status, module: ModuleType) -> None:
    owner_name, _, attribute = path.partition(":")[2].rpartition(".")
    try:
        owner = getattr(module, owner_name)
        found = getattr(owner, attribute)
    except AttributeError as e:
        if status is NOT_LOADED:  # Weir says so itself if vLLM loads it, else `weir.params` does
            if path == REQUESTS:
                NOT_LOADED.unheld = f"Weir cannot guard this vLLM: {path}: {e}"
            return
        raise Unguarded(f"Weir cannot guard this vLLM: {path}: {e}. {status.refusal}") from None
    if status is not NOT_LOADED or not (hasattr(found, "__weir__") or hasattr(found, "__weir_guarded__")):
        setattr(owner, attribute, guarded(path, unguarded(found), status))


def refuse_because_of(e: Exception) -> None:
    """Guard this process, in which `e` keeps Weir from working."""
    import logging

    why = cause_of(e)
    logging.getLogger(__name__).error("requests with Weir's keys are refused: %s", why, exc_info=e)
    hold(Failed(why))


def guarded(path: str, original: Any, status: Status) -> Any:
    """`original`, refusing what carries Weir's keys."""
    wrapper: Any = functools.wraps(original)(GUARDS[path](original, status))
    wrapper.__weir_guarded__, wrapper.__weir_status__ = original, status
    return wrapper


def unguarded(found: Any) -> Any:
    """What is behind a guard, or `found` itself."""
    return getattr(found, "__weir_guarded__", found)


def refusal_here() -> str | None:
    """Why requests with Weir's keys would be refused in this process, as far as it is known; None if they are not.

    Before vLLM has loaded an engine's modules nothing is known.
    """
    module = sys.modules.get(REQUESTS.partition(":")[0])
    if module is None or getattr(module.__spec__, "_initializing", False):
        return None
    held = getattr(getattr(module, "OutputProcessor", None), "add_request", None)
    status = getattr(held, "__weir_status__", None)
    return NOT_LOADED.unheld if status is None else status.refusal


def retry_next_time() -> None:
    """Have vLLM load its plugins again before it makes its next engine: it takes them for loaded, whatever they raise,
    and a second attempt in this process would go without a guard."""
    plugins: Any = importlib.import_module("vllm.plugins")
    if hasattr(plugins, "plugins_loaded"):
        plugins.plugins_loaded = False
