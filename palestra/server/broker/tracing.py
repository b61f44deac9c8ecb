"""Episodes as traces: one for each attempt, with its time in the queue, its lease, its model calls and its end.

The ids are derived from the attempt's name: a repeated claim and a restarted server give the same ones, and nothing has
to be stored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from palestra.episodes.board_events import OpenLease
from palestra.episodes.records import queued_since
from palestra.server.core.owners.callers import AttemptRef
from palestra.server.core.telemetry.spans import Span, SpanRef
from palestra.types.episodes import EndAnswer, EpisodeInfo
from palestra.util.json_types import JsonObject

if TYPE_CHECKING:
    from palestra.store.queries.traces import TurnFacts

_TRACEPARENT = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)


@dataclass(frozen=True, slots=True)
class AttemptTrace:
    """The trace of one attempt."""

    root: SpanRef
    leased: SpanRef
    """The player's work is inside this span."""

    @classmethod
    def of(cls, origin: str) -> AttemptTrace:
        """`origin` is that of `AttemptRef`."""
        made = _ids(origin)
        trace, root, leased = (int(part, 16) for part in (made[:32], made[32:48], made[48:]))
        return cls(SpanRef(trace, root), SpanRef(trace, leased))


def trace_id_of(origin: str) -> str:
    """Returns the trace id for logs, thousands of times a second: so it makes nothing but the text."""
    return _ids(origin)[:32]


def traceparent_of(origin: str) -> str:
    """Returns the parent of the player's spans; called as often."""
    made = _ids(origin)
    return f"00-{made[:32]}-{made[48:]}-01"


def _ids(origin: str) -> str:
    """Returns the ids of the trace, its root span and the span of the lease."""
    return blake2b(origin.encode(), digest_size=32, person=b"attempt trace").hexdigest()


def read_traceparent(text: str) -> SpanRef | None:
    """Parses a traceparent; None if it is missing or invalid: the standard says to continue without it then."""
    found = _TRACEPARENT.fullmatch(text.strip())
    if found is None or (found["version"] == "00" and found["more"]):
        return None
    ref = SpanRef(int(found["trace"], 16), int(found["span"], 16), is_sampled=bool(int(found["flags"], 16) & 1))
    return ref if ref.trace_id and ref.span_id else None


def attempt_spans(lease: OpenLease, info: EpisodeInfo, over_at: float, loss: str | None) -> list[Span]:
    """Returns the spans of an attempt that is over; `loss`: why it was lost."""
    trace = AttemptTrace.of(AttemptRef(lease.owner, info.episode_id, lease.ref.attempt).origin)
    claimed_at = min(lease.claimed_at, over_at)
    since = queued_since(info, lease.ref.attempt, claimed_at)
    attributes = _attempt_facts(lease, info) | {"palestra.outcome": "ended" if loss is None else loss.partition(":")[0]}
    error = loss or ""
    if loss is None and info.result is not None:
        if info.result.reward is not None:
            attributes["palestra.reward"] = info.result.reward
        if info.result.error is not None:
            error = f"{info.result.error.type}: {info.result.error.message}"
    return [
        Span(name="queued", began_at=since, ended_at=claimed_at, parent=trace.root),
        Span(name="leased", began_at=claimed_at, ended_at=over_at, parent=trace.root, ref=trace.leased),
        Span(
            name="episode",
            began_at=since,
            ended_at=over_at,
            parent=None,
            ref=trace.root,
            attributes=attributes,
            error=error,
        ),
    ]


def end_span(owner: str, end: EndAnswer, began_at: float, ended_at: float) -> Span:
    """Returns a span from the end request to its answer, also for one that came too late."""
    trace = AttemptTrace.of(AttemptRef(owner, end.episode_id, end.attempt).origin)
    return Span(
        name="end",
        began_at=began_at,
        ended_at=ended_at,
        parent=trace.root,
        attributes={"palestra.status": str(end.status)},
        error="" if end.is_kept else f"{end.status}: {end.detail}",
    )


def call_span(attempt: AttemptRef, traceparent: str, facts: TurnFacts, prompt_tokens: int, sampled_tokens: int) -> Span:
    """Returns the span of a model call that was answered."""
    attributes: JsonObject = {
        "gen_ai.request.model": facts.base_model,
        "gen_ai.response.id": facts.response_id,
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": sampled_tokens,
        "palestra.route": facts.route,
        "palestra.weights": facts.weights,
        "palestra.compute_s": facts.compute_s,
    }
    if facts.version is not None:
        attributes["palestra.version"] = facts.version
    return _call(attempt, traceparent, facts.started_at, facts.prepare_s + facts.sample_s, attributes)


def failed_call_span(attempt: AttemptRef, traceparent: str, began_at: float, ended_at: float, error: str) -> Span:
    return _call(attempt, traceparent, began_at, ended_at - began_at, {}, error)


def _call(
    attempt: AttemptRef, traceparent: str, began_at: float, seconds: float, attributes: JsonObject, error: str = ""
) -> Span:
    """Returns a span inside the one that the player names, else inside its lease. If the player has a trace of its own,
    the attempt's trace is linked."""
    leased = AttemptTrace.of(attempt.origin).leased
    given = read_traceparent(traceparent)
    return Span(
        name="model call",
        began_at=began_at,
        ended_at=began_at + max(seconds, 0.0),
        parent=given or leased,
        link=leased if given is not None and given.trace_id != leased.trace_id else None,
        attributes={"palestra.episode": attempt.episode_id, "palestra.attempt": attempt.attempt, **attributes},
        error=error,
    )


def _attempt_facts(lease: OpenLease, info: EpisodeInfo) -> JsonObject:
    return {
        "palestra.owner": lease.owner,
        "palestra.run": info.run,
        "palestra.group": info.group_id,
        "palestra.episode": info.episode_id,
        "palestra.attempt": lease.ref.attempt,
        "palestra.kind": str(info.kind),
        "palestra.client": lease.client_id,
        "palestra.version": info.version,
        "palestra.calls": info.calls,
        "palestra.sampled_tokens": info.sampled_tokens,
    }
