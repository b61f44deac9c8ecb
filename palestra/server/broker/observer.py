"""Reports what happens to episodes, as log lines and as metrics: docs/metrics.md has the list."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from palestra.episodes.board import EpisodeBoard
from palestra.episodes.board_events import OpenLease, RunProgress
from palestra.server.broker.clock import Clock
from palestra.server.broker.tracing import attempt_spans, call_span, end_span, failed_call_span, trace_id_of
from palestra.server.core.owners.callers import AttemptRef
from palestra.server.core.telemetry.spans import Span
from palestra.types.episodes import ClaimRequest, EndAnswer, Lease, PlayedGroup, Registered

if TYPE_CHECKING:
    from palestra.server.core.telemetry.otlp import OtlpExporter
    from palestra.store.queries.traces import TurnFacts

WAIT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
PLAY_BUCKETS_S = (0.1, 0.5, 1, 5, 15, 60, 300, 1800, 7200)
VERSION_BUCKETS = (0, 1, 2, 3, 5, 10, 30, 100)
LAG_BUCKETS_S = (0.01, 0.05, 0.25, 1, 5, 15, 60, 300, 1800, 7200)
RUN = ["owner", "run"]
MAX_UNREAD = 10_000
"""Number of groups of a run whose time to their first reading is measured. Some are never read: they are pushed, or
committed by a trainer that has them from elsewhere."""

RunName = tuple[str, str]
"""Owner and run."""


class EpisodeObserver:
    """Logs what is normal at debug, the rest at info: there may be thousands of events in a second."""

    def __init__(self, registry: CollectorRegistry, traces: OtlpExporter | None = None) -> None:
        self._traces = traces
        # Bound once, with the configured level: a line that is not logged then costs nothing.
        self._log = structlog.get_logger("palestra.episodes").bind()
        self._tells_all = self._log.is_enabled_for(logging.DEBUG)
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self._claims = counter("palestra_episode_claims", "Episodes claimed", RUN)
        self._ends = counter("palestra_episode_ends", "Requests to end an episode, by answer", ["status"])
        self._losses = counter("palestra_episode_losses", "Attempts lost", [*RUN, "reason"])
        self._sampled = counter("palestra_episode_sampled_tokens", "Tokens sampled for episodes", RUN)
        self._waiting = gauge("palestra_episode_claims_waiting", "Claims that wait for an episode")
        self._wait_s = histogram(
            "palestra_episode_claim_wait_seconds", "Time from a claim to its episodes", buckets=WAIT_BUCKETS_S
        )
        self._lag_s = histogram(
            "palestra_episode_delivery_seconds",
            "Time from a group's end to its first delivery",
            RUN,
            buckets=LAG_BUCKETS_S,
        )
        self._played_s = histogram(
            "palestra_episode_play_seconds", "How long a lease was held", [*RUN, "outcome"], buckets=PLAY_BUCKETS_S
        )
        self._queued_s = histogram(
            "palestra_episode_queue_seconds",
            "Time from when an episode could be claimed to its claim",
            RUN,
            buckets=LAG_BUCKETS_S,
        )
        self._behind = histogram(
            "palestra_episode_versions_behind",
            "Age of the oldest weights of a delivered group, in versions behind the newest",
            RUN,
            buckets=VERSION_BUCKETS,
        )
        self._ready: dict[RunName, int] = {}
        """Number of the newest group that was ready, by run."""
        self._unread: dict[RunName, dict[int, float]] = {}
        """Since when groups are unread, by number; the oldest first."""
        self._at_scrape = _AtScrape()
        registry.register(self._at_scrape)
        self.on_trainer: Callable[[str, str], None] = lambda _owner, _run: None
        """Called when a trainer seems to be at work on this run."""

    def watch(self, board: Callable[[], EpisodeBoard | None], clock: Clock) -> None:
        self._at_scrape.board, self._at_scrape.clock = board, clock

    def watch_claims(self, count: Callable[[], int]) -> None:
        self._waiting.set_function(count)

    # Transitions

    def registered(self, owner: str, run: str, groups: Sequence[Registered]) -> None:
        self.on_trainer(owner, run)
        for one in groups if self._tells_all else ():
            if one.is_new:
                self._log.debug(
                    "group registered", owner=owner, run=run, group=one.group_id, episodes=len(one.episode_ids)
                )

    def claimed(self, owner: str, request: ClaimRequest, leases: Sequence[Lease], waited_s: float) -> None:
        if leases:
            self._wait_s.observe(waited_s)
        board = self._at_scrape.board() if self._at_scrape.board is not None else None
        for lease in leases:
            self._claims.labels(owner, lease.run).inc()
            queued_s = None if board is None else board.queued_s(lease.episode_id, lease.attempt)
            if queued_s is not None:
                self._queued_s.labels(owner, lease.run).observe(queued_s)
            if self._tells_all:
                self._log.debug(
                    "episode claimed",
                    owner=owner,
                    run=lease.run,
                    episode=lease.episode_id,
                    attempt=lease.attempt,
                    client=request.client_id,
                    version=lease.version,
                    trace_id=lease.traceparent[3:35],
                )

    def sampled(self, owner: str, run: str, tokens: int) -> None:
        self._sampled.labels(owner, run).inc(tokens)

    def called(
        self, attempt: AttemptRef, traceparent: str, facts: TurnFacts, prompt_tokens: int, sampled_tokens: int
    ) -> None:
        """Reports a model call that was answered. `traceparent` is what the player sent."""
        if self._traces is not None:
            self._traces.add([call_span(attempt, traceparent, facts, prompt_tokens, sampled_tokens)])

    def call_failed(self, attempt: AttemptRef, traceparent: str, began_at: float, now: float, error: str) -> None:
        if self._traces is not None:
            self._add(self._traces, [failed_call_span(attempt, traceparent, began_at, now, error)])

    def ended(self, owner: str, ends: Sequence[EndAnswer], began_at: float) -> None:
        for end in ends:
            self._ends.labels(end.status).inc()
            if end.is_kept and not self._tells_all:
                continue
            line = self._log.debug if end.is_kept else self._log.info
            line(
                "episode ended",
                owner=owner,
                episode=end.episode_id,
                attempt=end.attempt,
                status=end.status,
                trace_id=_trace_id(owner, end.episode_id, end.attempt),
            )
        if self._traces is not None:
            now = began_at if self._at_scrape.clock is None else self._at_scrape.clock.now()
            self._add(self._traces, (end_span(owner, end, began_at, now) for end in ends))

    def over(self, board: EpisodeBoard, lease: OpenLease) -> None:
        """Reports the end of a lease."""
        how = board.outcome(lease)
        if how is None:
            return
        reason = how.loss
        if how.over_at is not None:
            outcome = "ended" if reason is None else reason.partition(":")[0]
            self._played_s.labels(lease.owner, lease.run, outcome).observe(max(how.over_at - lease.claimed_at, 0.0))
            if self._traces is not None:
                info = board.find(lease.owner, lease.ref.episode_id)
                self._add(self._traces, attempt_spans(lease, info, how.over_at, reason))
        if reason is None:
            return  # `ended` reports how it ended
        self._losses.labels(lease.owner, lease.run, reason.partition(":")[0]).inc()
        self._log.info(
            "attempt lost",
            owner=lease.owner,
            run=lease.run,
            episode=lease.ref.episode_id,
            attempt=lease.ref.attempt,
            client=lease.client_id,
            reason=reason,
            state=how.state,
            trace_id=_trace_id(lease.owner, lease.ref.episode_id, lease.ref.attempt),
        )

    def _add(self, traces: OtlpExporter, spans: Iterable[Span]) -> None:
        """Adds spans, whose times are the broker's, converted to the wall clock, which model calls, players and the
        collector use."""
        behind_s = 0.0 if self._at_scrape.clock is None else self._at_scrape.clock.behind_s()
        traces.add(
            replace(span, began_at=span.began_at + behind_s, ended_at=span.ended_at + behind_s) for span in spans
        )

    def delivered(self, run: RunName, progress: RunProgress, now: float) -> None:
        """Reports that there is at least one more group to read."""
        unread, newest = self._unread.setdefault(run, {}), progress.delivered
        for number in range(self._ready.get(run, newest - 1) + 1, newest + 1):
            unread[number] = now
            if self._tells_all:
                self._log.debug("group ready", owner=run[0], run=run[1], number=number)
        self._ready[run] = newest
        while unread and (next(iter(unread)) <= progress.committed or len(unread) > MAX_UNREAD):
            del unread[next(iter(unread))]

    def read(self, run: RunName, groups: Sequence[PlayedGroup], version: int, now: float) -> None:
        """Reports that groups were read. `version` is the run's newest."""
        unread = self._unread.get(run, {})
        for group in groups:
            if (ready := unread.pop(group.number, None)) is None:
                continue  # it was read before
            self._lag_s.labels(*run).observe(now - ready)
            oldest = [one.info.oldest_version for one in group.episodes]
            for behind in (version - one for one in oldest if one is not None):
                self._behind.labels(*run).observe(behind)

    def deleted(self, run: RunName) -> None:
        """Forgets a deleted run: another run of its name numbers its groups from the beginning."""
        self._ready.pop(run, None)
        self._unread.pop(run, None)

    def requeued(self, owner: str, episode_ids: Sequence[str]) -> None:
        for episode_id in episode_ids:
            self._log.info("episode requeued", owner=owner, episode=episode_id)

    def changed(self, what: str, owner: str, run: str, **facts: object) -> None:
        """Reports a change by the trainer: paused, resumed, weights, committed, cancelled …"""
        self.on_trainer(owner, run)
        self._log.info(what, owner=owner, run=run, **facts)


def _trace_id(owner: str, episode_id: str, attempt: int) -> str:
    return trace_id_of(AttemptRef(owner, episode_id, attempt).origin)


class _AtScrape(Collector):
    """Values that exist anyway and are read at each scrape."""

    board: Callable[[], EpisodeBoard | None] | None = None
    clock: Clock | None = None

    def collect(self) -> Iterator[Metric]:
        labels = [*RUN, "kind"]
        queued = GaugeMetricFamily("palestra_episodes_queued", "Episodes that wait to be claimed", labels=labels)
        age = GaugeMetricFamily(
            "palestra_episodes_queued_seconds", "How long the oldest queued episode has waited", labels=labels
        )
        leased = GaugeMetricFamily("palestra_episodes_leased", "Episodes that are being played", labels=labels)
        board = self.board() if self.board is not None else None
        now = self.clock.now() if self.clock is not None else 0.0
        for one in board.queues() if board is not None else ():
            of = [one.owner, one.run, one.kind]
            queued.add_metric(of, one.queued)
            age.add_metric(of, 0.0 if one.oldest_at is None else max(0.0, now - one.oldest_at))
            leased.add_metric(of, one.leased)
        yield from (queued, age, leased)
