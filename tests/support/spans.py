"""Spans of OpenTelemetry, recorded instead of sent."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


def recorded(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Return what has the spans that end from now on; a process can set its provider once, so that is left alone."""
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))

    def get_tracer(name: str, *args: Any, **kwargs: Any) -> trace.Tracer:
        return provider.get_tracer(name)

    monkeypatch.setattr(trace, "get_tracer", get_tracer)
    return spans
