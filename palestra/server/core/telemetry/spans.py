"""Spans of traces, as records that `otlp` sends."""

from __future__ import annotations

from dataclasses import dataclass, field

from palestra.util.json_types import JsonObject


@dataclass(frozen=True, slots=True)
class SpanRef:
    trace_id: int
    span_id: int
    is_sampled: bool = True

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span that has ended. Times are seconds since the epoch."""

    name: str
    began_at: float
    ended_at: float
    parent: SpanRef | None
    ref: SpanRef | None = None
    """None: any id will do, because no other span refers to it."""
    link: SpanRef | None = None
    attributes: JsonObject = field(default_factory=dict)
    error: str = ""
