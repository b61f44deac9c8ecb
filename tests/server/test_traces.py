"""Traces: a call is a span, its stages are spans inside, end to end without gaps."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs palestra[otel]")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs palestra[otel]")

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from palestra.server.core.telemetry.otlp import OtlpExporter
from palestra.server.core.telemetry.spans import Span, SpanRef


def test_a_call_is_a_span_with_its_stages_inside():
    kept = InMemorySpanExporter()
    traces = OtlpExporter(SimpleSpanProcessor(kept))
    traces.finished("sample", 1.0, 0.7, base_model="m", submit_s=0.1, request_id="r1")
    spans = {span.name: span for span in kept.get_finished_spans()}
    call = spans.pop("sample")
    assert call.attributes == {
        "palestra.request_id": "r1",
        "palestra.base_model": "m",
        "palestra.outcome": "ok",
    }
    stages = sorted(spans.values(), key=lambda span: (span.start_time, span.end_time))
    assert [span.name for span in stages] == ["submit", "queue", "compute"]
    assert all(span.parent.span_id == call.context.span_id for span in stages)
    edges = [call.start_time, *(span.end_time for span in stages)]
    assert edges == [*(span.start_time for span in stages), call.end_time]
    assert [round((span.end_time - span.start_time) / 1e9, 3) for span in stages] == [0.1, 0.2, 0.7]


def test_a_failure_is_marked_and_odd_times_do_not_turn_spans_round():
    kept = InMemorySpanExporter()
    OtlpExporter(SimpleSpanProcessor(kept)).finished("optim_step", 0.1, 5.0, outcome="user_error", submit_s=3.0)
    for span in kept.get_finished_spans():
        assert span.start_time <= span.end_time
    assert kept.get_finished_spans()[-1].status.description == "user_error"


def test_spans_with_given_ids_are_where_they_belong():
    kept = InMemorySpanExporter()
    traces, root, inner = OtlpExporter(SimpleSpanProcessor(kept)), SpanRef(7 << 64, 5), SpanRef(7 << 64, 6)
    elsewhere = SpanRef(8 << 64, 9)
    times = {"began_at": 10.0, "ended_at": 12.5}
    traces.add(
        [
            Span(name="call", parent=elsewhere, link=inner, error="too late, with tml-0123456789ab", **times),
            Span(name="inner", parent=root, ref=inner, attributes={"palestra.run": "r"}, **times),
            Span(name="root", parent=None, ref=root, **times),
            Span(name="unsampled", parent=SpanRef(8 << 64, 9, is_sampled=False), **times),
        ]
    )
    traces.finished("sample", 0.1, 0.05)
    call, within, top, *others = kept.get_finished_spans()
    ids = [(span.context.trace_id, span.context.span_id) for span in (within, top)]
    assert ids == [(inner.trace_id, inner.span_id), (root.trace_id, root.span_id)]
    assert (within.parent.span_id, top.parent) == (root.span_id, None)
    assert (top.start_time, top.end_time) == (10 * 10**9, 12.5 * 10**9)
    assert (call.context.trace_id, call.parent.span_id) == (elsewhere.trace_id, elsewhere.span_id)
    assert [link.context.span_id for link in call.links] == [inner.span_id]
    assert call.status.description == "too late, with [redacted]"
    assert dict(within.attributes) == {"palestra.run": "r"}
    assert root.trace_id not in {span.context.trace_id for span in others}
    assert {span.name for span in others} == {"sample", "submit", "queue", "compute"}


def test_spans_reach_a_collector():
    received: list[str] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(self.path if body else "empty")
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            traces = OtlpExporter.to(f"http://127.0.0.1:{server.server_port}/")
            traces.finished("sample", 0.1, 0.05)
            traces.close()
        finally:
            server.shutdown()
            thread.join()
    assert received == ["/v1/traces"]
