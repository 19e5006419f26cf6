"""The server that an engine client belongs to, and the response that is being built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from vllm_weir.errors import WeirError
from vllm_weir.frontend.lookup import frontend_of
from vllm_weir.guard.refuse import ROUTES
from vllm_weir.guard.request_errors import WeirRequestError
from vllm_weir.schema.keys import asks
from vllm_weir.schema.request import RequestSpec
from vllm_weir.server.response import ResponseBuilder
from vllm_weir.server.state import ServerState

current_response: ContextVar[ResponseBuilder | None] = ContextVar("weir_reply", default=None)
"""The builder of the response to the request that a task serves; None for a plain request."""

_rows_used: ContextVar[bool] = ContextVar("weir_rows_used", default=False)

SERVER = "_weir_server"
"""The attribute of an engine client that holds its `ServerState`."""


def server_of(engine_client: Any) -> ServerState:
    server = getattr(engine_client, SERVER, None)
    if server is None:
        server = ServerState(engine_client, frontend_of(engine_client))
        setattr(engine_client, SERVER, server)
    return server


def served_name(engine_client: Any) -> str:
    return engine_client.vllm_config.model_config.served_model_name


@contextmanager
def answering() -> Iterator[None]:
    """While this lasts, requests begin whose rows the server itself uses, so that no response has to carry them."""
    token = _rows_used.set(True)
    try:
        yield
    finally:
        _rows_used.reset(token)


def check_answered(params: Any, read: Callable[[Mapping[str, Any]], RequestSpec], scores_taken: bool = False) -> None:
    """Refuse a request for rows, or what is read off them, on a route whose responses cannot carry them.

    `read`: makes a request of extra arguments; `scores_taken`: whether a controller of the engine gets the scores.
    """
    extra = getattr(params, "extra_args", None)
    if current_response.get() is not None or _rows_used.get() or not extra or not asks(extra, None):
        return
    try:
        spec = read(extra)
    except WeirError as e:
        raise WeirRequestError(e.message, e.field) from None
    captures = spec.capture if spec.qk is None else (*spec.capture, spec.qk)
    if any(capture.sink.memory for capture in captures):
        field = captures[0].path.partition("[")[0]
        raise WeirRequestError(f"responses of this route cannot carry rows; use {ROUTES}, or name a sink", field)
    unread = _unread(spec, scores_taken)
    if unread is not None:
        what, field = unread
        raise WeirRequestError(f"responses of this route cannot carry {what}; use {ROUTES}", field)


def _unread(spec: RequestSpec, scores_taken: bool) -> tuple[str, str] | None:
    """Return what a request computes for its response alone, and the field that asks for it; None for nothing."""
    if spec.features:
        return "features", "features"
    if spec.lens:
        return "a lens", "lens"
    if spec.dose:
        return "measured doses", "dose"
    if spec.routing is not None and spec.routing.weights:  # vLLM's own field has the experts
        return "weights of routing", "routing.weights"
    used = {rule.name for rule in spec.stop_when}
    gates = [one.when for one in (*spec.interventions, *spec.hooks) if one.when is not None]
    used |= {gate.probe for gate in gates}
    if scores_taken or any(gate.controller for gate in gates):
        return None
    names = (probe if isinstance(probe, str) else probe.name for probe in spec.probes)
    unused = next((i for i, name in enumerate(names) if name not in used), None)
    return None if unused is None else ("scores of a probe that neither stops nor steers", f"probes[{unused}]")
