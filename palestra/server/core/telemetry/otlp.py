"""Exports traces by OTLP, if configured (`otlp_endpoint`): each call as a span, with its waiting times inside; episodes
as traces of their own.

Owns: the structure of spans, sending them in the background. Never touches: metrics, what is traced. Importing this
needs `palestra[otel]`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Self

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
    OTLPSpanExporter,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from palestra.config.redaction import redact
from palestra.server.core.telemetry.spans import Span, SpanRef


class OtlpExporter:
    """An exporter with a provider of its own: there is no global state, so two servers in one process do not mix."""

    def __init__(self, processor: SpanProcessor) -> None:
        self._ids = _Ids()
        resource = Resource.create({"service.name": "palestra"})
        self._provider = TracerProvider(resource=resource, id_generator=self._ids)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("palestra.server")

    @classmethod
    def to(cls, endpoint: str) -> Self:
        """`endpoint` is the collector's address, such as http://host:4318."""
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")))

    def finished(
        self,
        kind: str,
        total_s: float,
        compute_s: float,
        *,
        base_model: str = "",
        outcome: str = "ok",
        submit_s: float = 0.0,
        **ids: str,
    ) -> None:
        """Reports a call that has just ended: accepted in `submit_s`, then queued, then computed. `ids`: request_id,
        model_id …

        It is reported when it is over, so that nothing has to be carried through queues and processes meanwhile.
        """
        end = time.time_ns()
        start, computed = end - int(total_s * 1e9), end - int(min(compute_s, total_s) * 1e9)
        accepted = min(start + int(submit_s * 1e9), computed)
        attributes = {f"palestra.{name}": value for name, value in ids.items()}
        attributes |= {"palestra.base_model": base_model, "palestra.outcome": outcome}
        call = self._tracer.start_span(kind, start_time=start, attributes=attributes)
        inside = set_span_in_context(call)
        for name, begin, until in (
            ("submit", start, accepted),
            ("queue", accepted, computed),
            ("compute", computed, end),
        ):
            self._tracer.start_span(name, inside, start_time=begin).end(until)
        if outcome != "ok":
            call.set_status(Status(StatusCode.ERROR, outcome))
        call.end(end)

    def add(self, spans: Iterable[Span]) -> None:
        """Adds spans whose ids and parents are given: the trace may have begun elsewhere, or before this server did."""
        for span in spans:
            self._ids.given = span.ref
            begun = self._tracer.start_span(
                span.name,
                Context() if span.parent is None else set_span_in_context(NonRecordingSpan(_context(span.parent))),
                start_time=int(span.began_at * 1e9),
                attributes=span.attributes,
                links=[] if span.link is None else [Link(_context(span.link))],
            )
            self._ids.given = None
            if span.error:
                begun.set_status(Status(StatusCode.ERROR, redact(span.error)))
            begun.end(int(span.ended_at * 1e9))

    def close(self) -> None:
        """Sends what is left and closes the exporter."""
        self._provider.shutdown()


class _Ids(RandomIdGenerator):
    """Gives the next span the requested ids. Spans are made on the server's event loop only."""

    given: SpanRef | None = None

    def generate_span_id(self) -> int:
        return super().generate_span_id() if self.given is None else self.given.span_id

    def generate_trace_id(self) -> int:
        return super().generate_trace_id() if self.given is None else self.given.trace_id


def _context(ref: SpanRef) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if ref.is_sampled else TraceFlags.DEFAULT)
    return SpanContext(ref.trace_id, ref.span_id, is_remote=True, trace_flags=flags)
