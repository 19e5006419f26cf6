"""Spans of OpenTelemetry of requests with Weir's keys, where vLLM traces requests (``--otlp-traces-endpoint``)."""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator


class RequestTrace:
    """Spans of one sequence, each of which begins where the one before ended.

    They belong to the client's span, or without one to the trace that the first of them begins. vLLM
    has set up where spans go, and imports this module's packages itself before it traces.

    Args:
        request_id: The id by which vLLM's own span names the request.
        headers: vLLM's ``trace_headers``, which name the client's span.
    """

    def __init__(self, request_id: str, headers: Mapping[str, str] | None) -> None:
        self._request_id = request_id
        self._context = TraceContextTextMapPropagator().extract(headers) if headers else None
        self._begun = time.time_ns()

    def span(self, name: str, failure: Exception | None = None, **attributes: int) -> None:
        """Record what has gone on since the last span, which ends now; `failure` says why it failed."""
        now = time.time_ns()
        named = {f"weir_{key}": value for key, value in attributes.items()}
        span = trace.get_tracer("vllm_weir").start_span(
            f"weir_{name}",
            context=self._context,
            start_time=self._begun,
            attributes={"gen_ai.request.id": self._request_id, **named},
        )
        if failure is not None:
            span.set_status(trace.StatusCode.ERROR, str(failure))
        span.end(now)
        if self._context is None:
            self._context = trace.set_span_in_context(span)
        self._begun = now
