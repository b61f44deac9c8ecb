"""Charts of the server's last minutes, in the form that the dashboard's charts have."""

from __future__ import annotations

from collections.abc import Sequence

from palestra.server.core.telemetry.activity import EVERY_S, RATE_S, Activity, EngineReading, ServerReading, rate
from palestra.util.json_types import JsonObject
from palestra.view.runs.charts import Chart, Line, Series
from palestra.view.runs.metric_descriptions import MetricDescription

RATE_READINGS = round(RATE_S / EVERY_S)

WORDS = {
    "trained": ("tokens/s trained", "Tokens that went through training passes, each second.", ""),
    "sampled": ("tokens/s sampled", "Tokens that were sampled, each second.", ""),
    "train": ("training", "Training calls without a result.", "short, unless many clients train at once"),
    "sample": ("sampling", "Sampling calls without a result.", "below `limits.max_pending_samples`"),
    "running": ("being sampled", "Samples that the engine generates at the moment.", ""),
    "kv": ("KV cache", "Share of the KV cache's pages in use.", "below 1; at 1 samples wait for pages"),
    "gap": ("gap p95", "Time from one token of a sample to its next, 95th percentile, in seconds.", ""),
}
CHARTS = (
    ("Throughput", ("trained", "sampled"), False),
    ("Waiting", ("train", "sample", "running"), False),
    ("KV cache", ("kv",), True),
    ("Time between tokens", ("gap",), False),
)
"""Title, curves, and whether they are shares."""


def read_charts(activity: Activity) -> dict[str, list[Chart]]:
    """The charts of every engine."""
    readings = list(activity.readings)
    rows = [point(readings, at) for at in range(1, len(readings))]
    engines = readings[-1].engines if readings else {}
    return {name: [_chart(*chart, rows, name) for chart in CHARTS] for name in engines}


def point(readings: Sequence[ServerReading], at: int) -> JsonObject:
    """The values of all engines' curves at a reading, named ENGINE/CURVE. Rates are over some readings before it: a
    micro-batch may take longer than from one to the next."""
    old, new = readings[max(0, at - RATE_READINGS)], readings[at]
    row: JsonObject = {"at": round(new.at)}
    for name, reading in new.engines.items():
        for curve, value in _values(old, new, name, reading).items():
            row[f"{name}/{curve}"] = round(value, 4)
    return row


def _values(old: ServerReading, new: ServerReading, name: str, reading: EngineReading) -> dict[str, float]:
    return {
        "trained": rate(old, new, name, "tokens_trained"),
        "sampled": rate(old, new, name, "tokens_sampled"),
        "train": reading.waiting.get("train", 0),
        "sample": reading.waiting.get("sample", 0),
        "running": reading.values.get("running_samples", 0.0),
        "kv": reading.values.get("kv_used", 0.0),
        "gap": reading.values.get("token_gap_p95_s", 0.0),
    }


def _chart(title: str, curves: tuple[str, ...], is_share: bool, rows: list[JsonObject], engine: str) -> Chart:
    times = [row["at"] for row in rows]
    lines = [_line(curve, engine, [row.get(f"{engine}/{curve}") for row in rows]) for curve in curves]
    return Chart(title, Series(times, times, lines, is_sampled=False), band=[], is_stacked=False, is_share=is_share)


def _line(curve: str, engine: str, values: list[float | None]) -> Line:
    label, meaning, healthy = WORDS[curve]
    return Line(f"{engine}/{curve}", label, MetricDescription(label, meaning, healthy), values)
