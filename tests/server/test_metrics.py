"""/metrics: every name is documented, and a worker's restart takes nothing back."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from palestra.episodes.board import EpisodeBoard
from palestra.server.broker.clock import Clock
from palestra.server.broker.observer import EpisodeObserver
from palestra.server.core.telemetry.metrics import (
    WORKER_COUNTERS,
    WORKER_GAUGES,
    JournalState,
    Metrics,
    RequestQueueState,
)
from palestra.types.engine import Stats
from palestra.types.episodes import ClaimRequest, EndRequest, EpisodeResult, LeaseRef, NewGroup
from palestra.types.rollouts import Task

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_the_docs_list_every_metric_with_its_labels():
    rows = re.findall(r"^\| `(palestra_\w+)` \| ([\w, ]*)\|", DOCS.read_text(), re.MULTILINE)
    documented = {name: {label.strip() for label in labels.split(",")} - {""} for name, labels in rows}
    metrics = busy_metrics()
    shown: dict[str, set[str]] = {}
    for family in metrics.registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert family.samples, f"{name} is not fed by busy_metrics"
        shown[name] = set(family.samples[0].labels) - {"le"}
    assert documented == shown


def test_render_is_what_prometheus_reads():
    text = busy_metrics().render().decode()
    families = {family.name for family in text_string_to_metric_families(text)}
    assert {"palestra_requests", "palestra_queue_depth", "palestra_call_overhead_seconds"} <= families


def test_every_count_and_state_of_a_worker_is_shown():
    fields = set(Stats.__struct_fields__)
    assert fields == WORKER_COUNTERS.keys() | WORKER_GAUGES.keys()


def test_two_servers_in_one_process_do_not_mix():
    one, other = Metrics(), Metrics()
    one.request("/healthz", 200, 0.001)
    assert value(one, "palestra_requests_total", route="/healthz", status="200") == 1
    assert value(other, "palestra_requests_total", route="/healthz", status="200") is None


def test_counts_go_on_when_a_worker_starts_again_from_zero():
    metrics = Metrics()
    metrics.worker_hello("m")
    metrics.worker_stats("m", Stats(tokens_trained=100, tokens_sampled=10))
    metrics.worker_stats("m", Stats(tokens_trained=150, tokens_sampled=10))
    metrics.worker_gone("m")
    metrics.worker_restarted("m", "died")
    metrics.worker_hello("m")
    metrics.worker_stats("m", Stats(tokens_trained=200))  # more than before, and all of it new
    assert value(metrics, "palestra_tokens_trained_total", base_model="m") == 350
    assert value(metrics, "palestra_tokens_sampled_total", base_model="m") == 10
    assert value(metrics, "palestra_worker_restarts_total", base_model="m", reason="died") == 1


def test_counts_never_fall_even_if_nobody_told_of_the_restart():
    metrics = Metrics()
    metrics.worker_stats("m", Stats(tokens_trained=100, train_s=1.5))
    metrics.worker_stats("m", Stats(tokens_trained=30, train_s=0.5))
    assert value(metrics, "palestra_tokens_trained_total", base_model="m") == 130
    assert value(metrics, "palestra_train_seconds_total", base_model="m") == 2.0


def test_an_adopted_worker_does_not_tell_its_earlier_work_again():
    metrics = Metrics()
    metrics.worker_hello("m", adopted=True)
    metrics.worker_stats("m", Stats(tokens_trained=1_000_000))
    metrics.worker_stats("m", Stats(tokens_trained=1_000_050))
    assert value(metrics, "palestra_tokens_trained_total", base_model="m") == 50


def test_a_worker_that_is_gone_holds_nothing():
    metrics = Metrics()
    metrics.worker_hello("m")
    metrics.worker_stats("m", Stats(kv_used=0.5, models=3))
    assert value(metrics, "palestra_kv_used_ratio", base_model="m") == 0.5
    metrics.worker_gone("m")
    assert value(metrics, "palestra_kv_used_ratio", base_model="m") == 0
    assert value(metrics, "palestra_worker_up", base_model="m") == 0


def test_overhead_is_the_time_that_was_not_computing():
    metrics = Metrics()
    metrics.finished("sample", 0.5, 0.498, base_model="m")
    metrics.finished("sample", 0.5, 0.6, base_model="m")  # a shared batch may count more than the clock
    labels = {"base_model": "m", "type": "sample"}
    assert value(metrics, "palestra_call_overhead_seconds_bucket", le="0.003", **labels) == 2
    assert value(metrics, "palestra_compute_seconds_count", **labels) == 2


def test_queues_and_journal_are_read_when_somebody_asks():
    metrics, queues = Metrics(), [RequestQueueState("m", "train", 3, 1.5)]
    metrics.watch_queues(lambda: queues)
    metrics.watch_journal(lambda: JournalState(size_bytes=4096, segments=2))
    assert value(metrics, "palestra_queue_depth", base_model="m", kind="train") == 3
    assert value(metrics, "palestra_queue_age_seconds", base_model="m", kind="train") == 1.5
    queues.clear()
    assert value(metrics, "palestra_queue_depth", base_model="m", kind="train") is None
    assert value(metrics, "palestra_journal_bytes") == 4096
    assert value(metrics, "palestra_journal_segments") == 2


def busy_metrics() -> Metrics:
    metrics = Metrics()
    metrics.request("/api/v1/forward", 200, 0.01)
    metrics.submitted("sample", base_model="m")
    metrics.finished("sample", 0.1, 0.09, base_model="m")
    metrics.sample_lost("m")
    metrics.owner_used("ann", prompt=3, sampled=2, trained=0)
    metrics.quota_refused("ann", "tokens_per_day")
    metrics.conversation("m", "new")
    metrics.worker_hello("m")
    metrics.worker_stats("m", Stats(tokens_trained=1))
    metrics.worker_restarted("m", "died")
    metrics.replica_up("m", 0, is_up=True)
    metrics.replica_sampled("m", 0)
    metrics.replica_retried("m")
    metrics.replica_loaded("m")
    metrics.watch_queues(lambda: [RequestQueueState("m", "sample", 1, 0.1)])
    metrics.watch_journal(lambda: JournalState(0, 0))
    busy_episodes(EpisodeObserver(metrics.registry))
    return metrics


def busy_episodes(observer: EpisodeObserver) -> None:
    """One was lost and played again."""
    board, clock = EpisodeBoard(), Clock(lambda: 0.0, lambda: 0.0)
    observer.watch(lambda: board, clock)
    board.put_run("o", "r", 0.0)
    task = Task(id="t", environment="e", prompt=[])
    board.register("o", "r", [NewGroup(group_id="g", task=task, size=1)], 0.0)
    for now in (0.0, 1000.0):
        claim = ClaimRequest(client_id="c", claim_id=f"{now}")
        leases = board.claim("o", claim, now)
        observer.claimed("o", claim, leases, 0.1)
        for lease in leases:
            ref = LeaseRef(episode_id=lease.episode_id, attempt=lease.attempt)
            board.note_call("o", ref, now)
            board.call_over(ref, now)
            observer.sampled("o", "r", 4)
            result = EndRequest(episode_id=lease.episode_id, attempt=lease.attempt, result=EpisodeResult(reward=1.0))
            observer.ended("o", board.end("o", "c", [result], now or 999.0), now)
        for over in board.take_news().over:
            observer.over(board, over)
    observer.delivered(("o", "r"), board.progress("o", "r"), 1000.0)
    observer.read(("o", "r"), board.delivered("o", "r", 1000.0, after=0, limit=1), 3, 1001.0)
