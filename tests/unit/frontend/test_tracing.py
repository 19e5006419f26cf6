"""Spans of one sequence."""

from __future__ import annotations

from itertools import pairwise

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.support.spans import recorded
from vllm_weir.frontend.tracing import RequestTrace


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    return recorded(monkeypatch)


def spans_of(traces: InMemorySpanExporter, headers: dict[str, str] | None) -> list:
    made = RequestTrace("r", headers)
    for name in ("admission", "capture", "delivery"):
        made.span(name, rows=3)
    return list(traces.get_finished_spans())


def test_they_follow_each_other_in_the_clients_trace(traces: InMemorySpanExporter) -> None:
    spans = spans_of(traces, {"traceparent": f"00-{5:032x}-{7:016x}-01"})
    assert [(span.context.trace_id, span.parent.span_id) for span in spans] == [(5, 7)] * 3
    assert [span.name for span in spans] == ["weir_admission", "weir_capture", "weir_delivery"]
    assert all(dict(span.attributes) == {"gen_ai.request.id": "r", "weir_rows": 3} for span in spans)
    for before, after in pairwise(spans):
        assert before.start_time <= before.end_time == after.start_time <= after.end_time


def test_without_a_clients_trace_the_first_begins_one(traces: InMemorySpanExporter) -> None:
    first, *others = spans_of(traces, None)
    assert first.parent is None and {span.parent.span_id for span in others} == {first.context.span_id}


def test_a_failure_has_its_reason(traces: InMemorySpanExporter) -> None:
    RequestTrace("r", None).span("admission", ValueError("too large"))
    (span,) = traces.get_finished_spans()
    assert not span.status.is_ok and span.status.description == "too large"
