"""Episodes as traces: each attempt is one, whose ids follow from its name; players' spans join it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

import openai
import pytest
from prometheus_client import CollectorRegistry

from palestra.episodes.board import EpisodeBoard
from palestra.server.broker import observer as observing
from palestra.server.broker.clock import Clock
from palestra.server.broker.observer import EpisodeObserver
from palestra.server.broker.tracing import AttemptTrace, attempt_spans, read_traceparent, traceparent_of
from palestra.server.core.telemetry.spans import SpanRef
from palestra.types.episodes import (
    ClaimRequest,
    EndRequest,
    EpisodeResult,
    EpisodeState,
    LeaseRef,
    NewGroup,
    RunSettings,
)
from palestra.types.rollouts import Task
from tests.server.episodes.conftest import Api, player, ref, say
from tests.server.model_api.conftest import Ephebe

OWN = SpanRef(0xA1 << 96, 0xB2 << 32)
"""A span of the player's own."""
HI: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OWN.traceparent, OWN),
        (f" {OWN.traceparent} ", OWN),
        (f"00-{OWN.trace_id:032x}-{OWN.span_id:016x}-00", SpanRef(OWN.trace_id, OWN.span_id, is_sampled=False)),
        (f"cc-{OWN.trace_id:032x}-{OWN.span_id:016x}-01-later", OWN),
        (f"00-{OWN.trace_id:032x}-{OWN.span_id:016x}-01-later", None),
        (f"ff-{OWN.trace_id:032x}-{OWN.span_id:016x}-01", None),
        (f"00-{0:032x}-{OWN.span_id:016x}-01", None),
        (f"00-{OWN.trace_id:032x}-{0:016x}-01", None),
        (OWN.traceparent.upper(), None),
        ("", None),
        ("00-é", None),
    ],
)
def test_a_traceparent_is_read_as_the_standard_says(text: str, expected: SpanRef | None) -> None:
    assert read_traceparent(text) == expected


class Table:
    """A board with one run, and what became of its leases."""

    def __init__(self) -> None:
        self.board, self._claims = EpisodeBoard(), count()
        self.board.put_run("o", "r", 0.0, settings=RunSettings(backoff_s=8.0, lease_s=10.0))

    def register(self, *names: str) -> None:
        task = Task(id="t", environment="e", prompt=[])
        self.board.register("o", "r", [NewGroup(group_id=name, task=task, size=1) for name in names], 0.0)

    def claim(self, now: float) -> LeaseRef:
        (lease,) = self.board.claim("o", ClaimRequest(client_id="c", claim_id=f"{next(self._claims)}"), now)
        return LeaseRef(episode_id=lease.episode_id, attempt=lease.attempt)

    def end(self, lease: LeaseRef, now: float) -> None:
        result = EpisodeResult(reward=0.5)
        self.board.end("o", "c", [EndRequest(episode_id=lease.episode_id, attempt=lease.attempt, result=result)], now)

    def spans(self, over_at: float, loss: str | None) -> dict[str, Any]:
        (over,) = self.board.take_news().over
        info = self.board.find("o", over.ref.episode_id)
        return {span.name: span for span in attempt_spans(over, info, over_at, loss)}


def test_an_attempt_waits_is_held_and_is_over_without_gaps() -> None:
    table = Table()
    table.register("g")
    lost = table.claim(3.0)
    table.board.release("o", "c", [lost], "not now", 5.0)
    first = table.spans(5.0, "released: not now")
    assert [(name, span.began_at, span.ended_at) for name, span in first.items()] == [
        ("queued", 0.0, 3.0),
        ("leased", 3.0, 5.0),
        ("episode", 0.0, 5.0),
    ]
    assert (first["episode"].attributes["palestra.outcome"], first["episode"].error) == (
        "released",
        "released: not now",
    )
    assert first["episode"].attributes["palestra.client"] == "c"
    again = table.claim(20.0)
    table.end(again, 22.0)
    second = table.spans(22.0, None)
    queued = second["queued"]
    assert (queued.began_at, queued.ended_at) == (13.0, 20.0)  # since its back-off was over
    root = second["episode"]
    assert (root.attributes["palestra.outcome"], root.attributes["palestra.reward"], root.error) == ("ended", 0.5, "")
    assert queued.parent == second["leased"].parent == root.ref
    assert second["leased"].ref == AttemptTrace.of(f"{again.episode_id}#2").leased
    assert second["leased"].ref.traceparent == traceparent_of(f"{again.episode_id}#2")
    assert root.ref.trace_id != first["episode"].ref.trace_id


def test_time_in_the_queue_begins_anew_for_one_that_was_parked() -> None:
    table = Table()
    table.register("g")
    for number in range(16):
        table.board.release("o", "c", [table.claim(100.0 * number)], "cannot", 100.0 * number)
    (parked,) = table.board.episodes("o", state=EpisodeState.PARKED).episodes
    table.board.requeue("o", [parked.episode_id], 5000.0)
    again = table.claim(5007.0)
    assert table.board.queued_s(again.episode_id, again.attempt) == 7.0
    assert table.board.queued_s(again.episode_id, 16) is None  # that one is over


def test_spans_have_the_time_of_the_wall_clock_after_a_machine_was_asleep() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs palestra[otel]")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from palestra.server.core.telemetry.otlp import OtlpExporter

    response, steady, wall = InMemorySpanExporter(), [0.0], [1000.0]
    clock = Clock(lambda: wall[0], lambda: steady[0])
    watch = EpisodeObserver(CollectorRegistry(), OtlpExporter(SimpleSpanProcessor(response)))
    table = Table()
    watch.watch(lambda: table.board, clock)
    steady[0], wall[0] = steady[0] + 3600.0, wall[0] + 3600.0
    began_at = clock.now()  # for leases, a second has passed
    table.register("g")
    table.end(table.claim(began_at), began_at)
    (over,) = table.board.take_news().over
    watch.over(table.board, over)
    ended = {one.name: one.end_time for one in response.get_finished_spans()}
    assert ended == dict.fromkeys(("queued", "leased", "episode"), 4600 * 10**9)


def test_groups_that_nobody_reads_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "MAX_UNREAD", 3)
    table, registry = Table(), CollectorRegistry()
    watch, run = EpisodeObserver(registry), ("o", "r")

    def deliver(*names: str) -> None:
        table.register(*names)
        for _ in names:
            table.end(table.claim(5.0), 5.0)
            watch.delivered(run, table.board.progress(*run), 5.0)

    deliver(*"abcdefgh")
    watch.read(run, table.board.delivered(*run, 60.0, after=0, limit=100), 0, 60.0)
    labels = {"owner": "o", "run": "r"}
    assert registry.get_sample_value("palestra_episode_delivery_seconds_count", labels) == 3
    deliver("i", "j")
    table.board.commit(*run, 10, 70.0)  # unread
    deliver("k")
    watch.read(run, table.board.delivered(*run, 80.0, after=10, limit=100), 0, 80.0)
    assert registry.get_sample_value("palestra_episode_delivery_seconds_count", labels) == 4
    assert watch._unread == {run: {}}


# By OTLP


class Collected:
    """What a collector was sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self._lock = threading.Lock()

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (  # pyright: ignore[reportMissingImports]
            ExportTraceServiceRequest,
        )

        sent = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            self.spans += [span for one in sent.resource_spans for scope in one.scope_spans for span in scope.spans]

    def of(self, trace_id: str) -> list[Any]:
        with self._lock:
            return [span for span in self.spans if span.trace_id.hex() == trace_id]


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[str, Collected]]:
    pytest.importorskip("opentelemetry.sdk", reason="needs palestra[otel]")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs palestra[otel]")
    collected = Collected()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            import gzip

            body = self.rfile.read(int(self.headers["content-length"]))
            collected.take(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", collected
        server.shutdown()
        thread.join()


@pytest.fixture
def traced(
    collector: tuple[str, Collected], make_ephebe: Callable[..., Ephebe], monkeypatch: pytest.MonkeyPatch
) -> Api:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # not every 5 s
    api = Api(make_ephebe(otlp_endpoint=collector[0]))
    api.put_run(backoff_s=0)
    return api


@pytest.mark.slow
def test_a_collector_gets_one_trace_for_each_attempt_with_the_players_spans_in_it(
    traced: Api, collector: tuple[str, Collected]
) -> None:
    _, collected = collector
    traced.register("g")
    lost = traced.claim_one()
    say(player(lost), HI)
    traced.post("release", client_id=traced.client_id, leases=[ref(lost)], reason="not now")
    with pytest.raises(openai.APIStatusError):
        say(player(lost), HI)
    lease = traced.claim_one(wait_s=10)
    inside = f"{lease['traceparent'][:-19]}{OWN.span_id:016x}-01"  # a span of the player's, in this trace
    say(player(lease), HI, extra_headers={"traceparent": inside})
    say(player(lease), HI, extra_headers={"traceparent": OWN.traceparent})
    traced.server.until(lambda: len(collected.of(f"{OWN.trace_id:032x}")) == 1)
    traced.server.restart()  # the ids do not depend on who is asked
    traced.end(lease, 0.5)
    lost_id, trace_id = (one["traceparent"].split("-")[1] for one in (lost, lease))
    traced.server.until(lambda: {"episode", "end"} <= {span.name for span in collected.of(trace_id)})

    first = {span.name: span for span in collected.of(lost_id)}
    assert set(first) == {"episode", "queued", "leased", "model call"}
    assert first["episode"].status.message == "released: not now"
    calls = sorted(span.status.message != "" for span in collected.of(lost_id) if span.name == "model call")
    assert calls == [False, True]  # the second one came too late

    second = {span.name: span for span in collected.of(trace_id)}
    assert set(second) == {"episode", "queued", "leased", "end", "model call"}
    root, leased = second["episode"], second["leased"]
    assert (root.parent_span_id, leased.span_id.hex()) == (b"", lease["traceparent"].split("-")[2])
    assert {second[name].parent_span_id for name in ("queued", "leased", "end")} == {root.span_id}
    assert second["model call"].parent_span_id.hex() == f"{OWN.span_id:016x}"
    response = {one.key: one.value for one in second["model call"].attributes}
    assert response["gen_ai.usage.output_tokens"].int_value > 0
    assert response["palestra.episode"].string_value == lease["episode_id"]
    (elsewhere,) = collected.of(f"{OWN.trace_id:032x}")
    assert elsewhere.parent_span_id.hex() == f"{OWN.span_id:016x}"
    assert [link.span_id for link in elsewhere.links] == [leased.span_id]
