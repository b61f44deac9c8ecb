"""The server's metrics for Prometheus: docs/metrics.md has the list.

Owns: names, labels, buckets, adding up counts of workers that restart. Never touches: HTTP, what is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from palestra.types.engine import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Around the 3 ms that we promise for a call's overhead at p50.
OVERHEAD_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 30)
LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

# Fields of Stats that only grow while a worker lives, and their metrics.
WORKER_COUNTERS = {
    "tokens_trained": (
        "palestra_tokens_trained",
        "Tokens that training passes computed; those that data share count once",
    ),
    "tokens_sampled": ("palestra_tokens_sampled", "Tokens sampled"),
    "train_s": ("palestra_train_seconds", "Time spent training"),
    "sample_s": ("palestra_sample_seconds", "Time spent sampling"),
    "train_batches": ("palestra_train_batches", "Training micro-batches"),
    "train_batch_models": ("palestra_train_batch_models", "Models in training micro-batches, summed over batches"),
    "sample_steps": ("palestra_sample_steps", "Sampling steps"),
    "sample_rows": ("palestra_sample_rows", "Rows in sampling steps, summed over steps"),
    "optim_steps": ("palestra_optim_steps", "Optimizer steps, one for each model"),
    "snapshots": ("palestra_snapshots", "Snapshots of models written"),
}
# Fields of Stats that describe the present state.
WORKER_GAUGES = {
    "queued_train": ("palestra_worker_queued_train", "Training requests in the worker that have not begun"),
    "running_samples": ("palestra_worker_running_samples", "Samples being generated"),
    "waiting_samples": ("palestra_worker_waiting_samples", "Samples in the worker that have not begun"),
    "models": ("palestra_models", "Trained models in the worker"),
    "adapter_bytes": ("palestra_adapter_bytes", "Memory of adapters and their optimizer state"),
    "kept_samplers": ("palestra_kept_samplers", "Frozen sampler snapshots, in memory or spilled"),
    "sampler_bytes": ("palestra_sampler_bytes", "Memory of frozen sampler snapshots"),
    "token_gap_p95_s": ("palestra_token_gap_p95_seconds", "From one token of a sample to its next, 95th percentile"),
    "kv_used": ("palestra_kv_used_ratio", "Share of the cache's pages in use"),
    "cache_tokens": ("palestra_cache_tokens", "Tokens that the cache can hold"),
}


@dataclass(frozen=True, slots=True)
class RequestQueueState:
    base_model: str
    kind: str
    """One of train, sample."""
    depth: int
    oldest_s: float
    """How long the oldest one has been waiting; 0 if there is none."""


@dataclass(frozen=True, slots=True)
class JournalState:
    size_bytes: int
    segments: int


class Metrics:
    """The metrics of one server, with a registry of its own: two servers in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        latency = partial(Histogram, registry=self.registry, buckets=LATENCY_BUCKETS_S)
        overhead = partial(Histogram, registry=self.registry, buckets=OVERHEAD_BUCKETS_S)
        model, call = ["base_model"], ["base_model", "type"]
        self._requests = counter("palestra_requests", "HTTP requests answered", ["route", "status"])
        self._request_s = latency("palestra_request_seconds", "Time to answer a request", ["route"])
        self._submitted = counter("palestra_futures_submitted", "Calls accepted", call)
        self._finished = counter("palestra_futures_finished", "Calls with a result", [*call, "outcome"])
        self._overhead_s = overhead(
            "palestra_call_overhead_seconds", "Time from submission to result, without the computation", call
        )
        self._compute_s = latency("palestra_compute_seconds", "Time a worker computed for a call", call)
        self._restarts = counter("palestra_worker_restarts", "Workers started again", [*model, "reason"])
        self._up = gauge("palestra_worker_up", "1 while the worker is running and connected", model)
        self._lost = counter("palestra_samples_lost", "Samples answered with 410: send again", model)
        self._conversations = counter(
            "palestra_conversation_calls", "Prompts of chats, by where their token ids came from", [*model, "match"]
        )
        self._owner_tokens = counter("palestra_owner_tokens", "Tokens that an owner has used", ["owner", "kind"])
        self._quota_refusals = counter(
            "palestra_quota_refusals", "Requests refused because an owner's quota is used up", ["owner", "limit"]
        )
        self._replica_up = gauge("palestra_replica_up", "1 while this sampler replica is used", [*model, "replica"])
        self._replica_samples = counter(
            "palestra_replica_samples", "Requests answered by this sampler replica", [*model, "replica"]
        )
        self._replica_retries = counter("palestra_replica_retries", "Samples sent to replicas again", model)
        self._replica_loads = counter("palestra_replica_adapter_loads", "Adapters loaded at replicas", model)
        self._old_up = gauge("palestra_vllm_up", "Old name of palestra_replica_up", [*model, "replica"])
        self._old_retries = counter("palestra_vllm_retries", "Old name of palestra_replica_retries", model)
        self._old_loads = counter("palestra_vllm_adapter_loads", "Old name of palestra_replica_adapter_loads", model)
        self._worker_counters = {field: counter(*about, model) for field, about in WORKER_COUNTERS.items()}
        self._worker_gauges = {field: gauge(*about, model) for field, about in WORKER_GAUGES.items()}
        self._last_stats: dict[str, Stats | None] = {}
        self._at_scrape = _AtScrape()
        self.registry.register(self._at_scrape)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def read(self, names: Collection[str]) -> Iterator[tuple[str, dict[str, str], float]]:
        """Yields name, labels and value of samples with these names, as they are in Prometheus' format."""
        for metric in self.registry.restricted_registry(names).collect():
            for sample in metric.samples:
                yield sample.name, sample.labels, sample.value

    # Requests and calls

    def request(self, route: str, status: int, seconds: float) -> None:
        """`route` is the template, such as /api/v1/models/{model_id}."""
        self._requests.labels(route, str(status)).inc()
        self._request_s.labels(route).observe(seconds)

    def submitted(self, kind: str, *, base_model: str = "") -> None:
        """`kind` is the type of the call: sample, forward_backward, optim_step …"""
        self._submitted.labels(base_model, kind).inc()

    def finished(
        self, kind: str, total_s: float, compute_s: float, *, base_model: str = "", outcome: str = "ok"
    ) -> None:
        """`total_s`: from submission to result. `outcome`: ok, user_error, server_error or cancelled."""
        self._finished.labels(base_model, kind, outcome).inc()
        self._overhead_s.labels(base_model, kind).observe(max(0.0, total_s - compute_s))
        self._compute_s.labels(base_model, kind).observe(compute_s)

    def sample_lost(self, base_model: str, count: int = 1) -> None:
        self._lost.labels(base_model).inc(count)

    def conversation(self, base_model: str, match: str) -> None:
        self._conversations.labels(base_model, match).inc()

    def owner_used(self, owner: str, **tokens: int) -> None:
        """`tokens` are counts by kind: prompt, sampled, trained."""
        for kind, count in tokens.items():
            if count:
                self._owner_tokens.labels(owner, kind).inc(count)

    def quota_refused(self, owner: str, limit: str) -> None:
        self._quota_refusals.labels(owner, limit).inc()

    # Workers

    def worker_hello(self, base_model: str, *, adopted: bool = False) -> None:
        """Notes a new worker, which counts from 0. A worker that outlived its server has counts that the earlier server
        already reported."""
        self._last_stats[base_model] = None if adopted else Stats()
        self._up.labels(base_model).set(1)

    def worker_gone(self, base_model: str) -> None:
        self._up.labels(base_model).set(0)
        for gauge in self._worker_gauges.values():
            gauge.labels(base_model).set(0)

    def worker_restarted(self, base_model: str, reason: str) -> None:
        """`reason` says how the previous one ended, as in `watchdog.RestartReason`."""
        self._restarts.labels(base_model, reason).inc()

    def worker_stats(self, base_model: str, stats: Stats) -> None:
        last = self._last_stats.get(base_model, Stats())
        self._last_stats[base_model] = stats
        if last is not None and any(getattr(stats, field) < getattr(last, field) for field in WORKER_COUNTERS):
            last = Stats()  # another worker, whose Hello was not reported
        for field, counter in self._worker_counters.items():
            counter.labels(base_model).inc(getattr(stats, field) - getattr(last or stats, field))
        for field, gauge in self._worker_gauges.items():
            gauge.labels(base_model).set(getattr(stats, field))

    # Samplers beside the worker

    def tokens_sampled(self, base_model: str, count: int) -> None:
        """Counts tokens sampled by another sampler than the worker, which reports its own."""
        self._worker_counters["tokens_sampled"].labels(base_model).inc(count)

    def replica_up(self, base_model: str, replica: int, *, is_up: bool) -> None:
        for gauge in (self._replica_up, self._old_up):
            gauge.labels(base_model, str(replica)).set(is_up)

    def replica_gone(self, base_model: str, replica: int) -> None:
        """Notes that a replica has left for good."""
        for gauge in (self._replica_up, self._old_up):
            with suppress(KeyError):
                gauge.remove(base_model, str(replica))

    def replica_sampled(self, base_model: str, replica: int) -> None:
        self._replica_samples.labels(base_model, str(replica)).inc()

    def replica_retried(self, base_model: str) -> None:
        for counter in (self._replica_retries, self._old_retries):
            counter.labels(base_model).inc()

    def replica_loaded(self, base_model: str) -> None:
        for counter in (self._replica_loads, self._old_loads):
            counter.labels(base_model).inc()

    # Values read at each scrape

    def watch_queues(self, read: Callable[[], Iterable[RequestQueueState]]) -> None:
        self._at_scrape.queues = read

    def watch_journal(self, read: Callable[[], JournalState]) -> None:
        self._at_scrape.journal = read


class _AtScrape(Collector):
    """Values that exist anyway and are read at each scrape."""

    queues: Callable[[], Iterable[RequestQueueState]] | None = None
    journal: Callable[[], JournalState] | None = None

    def collect(self) -> Iterator[Metric]:
        labels = ["base_model", "kind"]
        depth = GaugeMetricFamily("palestra_queue_depth", "Calls without a result", labels=labels)
        age = GaugeMetricFamily("palestra_queue_age_seconds", "How long the oldest call has waited", labels=labels)
        for queue in self.queues() if self.queues else ():
            depth.add_metric([queue.base_model, queue.kind], queue.depth)
            age.add_metric([queue.base_model, queue.kind], queue.oldest_s)
        yield from (depth, age)
        size = GaugeMetricFamily("palestra_journal_bytes", "Size of the journal")
        segments = GaugeMetricFamily(
            "palestra_journal_segments", "Number of journal files; none if it is in the database"
        )
        if self.journal:
            state = self.journal()
            size.add_metric([], state.size_bytes)
            segments.add_metric([], state.segments)
        yield from (size, segments)
