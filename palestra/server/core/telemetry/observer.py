"""Reports the end of a call: to the metrics always, and as a trace if that is configured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from palestra.server.core.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from palestra.server.core.telemetry.otlp import OtlpExporter


class CallObserver:
    def __init__(self, metrics: Metrics, traces: OtlpExporter | None = None):
        self.metrics, self.traces = metrics, traces

    @classmethod
    def of(cls, metrics: Metrics, otlp_endpoint: str | None) -> CallObserver:
        if otlp_endpoint is None:
            return cls(metrics)
        from palestra.server.core.telemetry.otlp import OtlpExporter  # needs palestra[otel]

        return cls(metrics, OtlpExporter.to(otlp_endpoint))

    def finished(
        self, kind: str, total_s: float, compute_s: float, *, base_model: str, outcome: str, request_id: str
    ) -> None:
        self.metrics.finished(kind, total_s, compute_s, base_model=base_model, outcome=outcome)
        if self.traces is not None:
            self.traces.finished(
                kind, total_s, compute_s, base_model=base_model, outcome=outcome, request_id=request_id
            )

    def close(self) -> None:
        if self.traces is not None:
            self.traces.close()
