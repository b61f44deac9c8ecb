"""Traces: the calls of a model that belong together, each as the ids it read and sampled.

A turn keeps what it read since its parent; its prompt is the parent's prompt, the parent's sample, and that.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import Connection, delete, func, insert, select, update

from palestra.store.records import Page
from palestra.store.rows import fetch_one, fetch_page
from palestra.store.tables import traces as t
from palestra.store.tables import turns as u


class Trace(Struct, frozen=True, kw_only=True):
    trace_id: str
    owner: str
    model: str
    """As the client called it."""
    created_at: float
    updated_at: float
    turns: int = 0


class TurnSample(Struct, frozen=True, kw_only=True):
    tokens: list[int]
    logprobs: list[float]
    """Under the distribution they were drawn from, at the turn's temperature; one for each token."""
    stop_reason: str


class TurnFacts(Struct, frozen=True, kw_only=True):
    """What is known of a call beside its ids."""

    response_id: str
    route: str
    base_model: str
    weights: str
    """Exactly which: two turns with the same text here were sampled from the same weights."""
    temperature: float
    match: str
    """How its prompt was found: new, continued, branched, unmatched."""
    started_at: float
    """Seconds since the epoch."""
    prepare_s: float
    """To find and encode its prompt."""
    sample_s: float
    """From there until it was sampled, waiting included."""
    compute_s: float
    """Of the engine's time."""
    cached_tokens: int = 0
    params: dict[str, Any] = {}
    """Of the sampling, as far as they differ from the defaults."""
    user: str | None = None
    metadata: dict[str, Any] | None = None


class Turn(Struct, frozen=True, kw_only=True):
    prompt: list[int]
    """All of it."""
    samples: list[TurnSample]
    facts: TurnFacts
    number: int = -1
    """In its trace; given when it is kept."""
    parent: int | None = None
    parent_sample: int | None = None


class Purge(Struct, frozen=True, kw_only=True):
    """What of the traces may stay."""

    before: float
    """Those nothing was added to since then go."""
    max_turns: int
    """Of each owner; the traces that were used longest ago go first."""


class TurnKey(Struct, frozen=True):
    trace_id: str
    number: int


def append_turn(conn: Connection, trace: Trace, turn: Turn, read: Sequence[int]) -> TurnKey:
    """Where it is then. `read`: the end of its prompt that its parent does not have. A turn without a parent begins the
    trace; one whose trace was purged meanwhile begins another, with its whole prompt."""
    number = conn.execute(select(t.c.turns).where(t.c.trace_id == trace.trace_id)).scalar_one_or_none()
    if number is None:
        if turn.parent is not None:
            trace = msgspec.structs.replace(trace, trace_id=new_trace_id())
            turn, read = msgspec.structs.replace(turn, parent=None, parent_sample=None), turn.prompt
        number = 0
        conn.execute(insert(t).values(**msgspec.to_builtins(trace)))
    conn.execute(
        insert(u).values(
            trace_id=trace.trace_id,
            number=number,
            parent=turn.parent,
            parent_sample=turn.parent_sample,
            read=_int32(read),
            samples=msgspec.msgpack.encode([_packed(sample) for sample in turn.samples]),
            facts=msgspec.msgpack.encode(turn.facts),
        )
    )
    conn.execute(update(t).where(t.c.trace_id == trace.trace_id).values(turns=number + 1, updated_at=trace.updated_at))
    return TurnKey(trace.trace_id, number)


def new_trace_id() -> str:
    return f"trace-{secrets.token_hex(12)}"


def get_trace(conn: Connection, trace_id: str, owner: str) -> Trace | None:
    return fetch_one(conn, Trace, select(t).where(t.c.trace_id == trace_id, t.c.owner == owner))


def list_traces(conn: Connection, owner: str, *, limit: int, offset: int = 0) -> Page[Trace]:
    """The last used first."""
    query = select(t).where(t.c.owner == owner).order_by(t.c.updated_at.desc(), t.c.trace_id)
    return fetch_page(conn, Trace, query, limit=limit, offset=offset)


def turns_of(conn: Connection, trace_id: str) -> list[Turn]:
    """In the order they were kept: a parent comes before its children."""
    turns: list[Turn] = []
    for row in conn.execute(select(u).where(u.c.trace_id == trace_id).order_by(u.c.number)):
        before: list[int] = []
        if row.parent is not None:
            parent = turns[row.parent]
            before = [*parent.prompt, *parent.samples[row.parent_sample].tokens]
        packed = msgspec.msgpack.decode(row.samples, type=list[_PackedSample])
        turns.append(
            Turn(
                number=row.number,
                parent=row.parent,
                parent_sample=row.parent_sample,
                prompt=[*before, *array("i", row.read)],
                samples=[_unpacked(sample) for sample in packed],
                facts=msgspec.msgpack.decode(row.facts, type=TurnFacts),
            )
        )
    return turns


def purge_traces(conn: Connection, purge: Purge) -> int:
    """How many went."""
    newer = func.sum(t.c.turns).over(partition_by=t.c.owner, order_by=(t.c.updated_at.desc(), t.c.trace_id))
    ranked = select(t.c.trace_id, t.c.updated_at, newer.label("up_to_here")).subquery()
    is_over = (ranked.c.updated_at < purge.before) | (ranked.c.up_to_here > purge.max_turns)
    gone = list(conn.execute(select(ranked.c.trace_id).where(is_over)).scalars())
    for start in range(0, len(gone), MAX_NAMED):
        part = gone[start : start + MAX_NAMED]
        conn.execute(delete(u).where(u.c.trace_id.in_(part)))
        conn.execute(delete(t).where(t.c.trace_id.in_(part)))
    return len(gone)


MAX_NAMED = 500  # in one statement: SQLite may be built for 999


class _PackedSample(Struct, frozen=True, array_like=True):
    tokens: bytes
    logprobs: bytes
    stop_reason: str


def _packed(sample: TurnSample) -> _PackedSample:
    return _PackedSample(_int32(sample.tokens), array("f", sample.logprobs).tobytes(), sample.stop_reason)


def _unpacked(sample: _PackedSample) -> TurnSample:
    tokens, logprobs = array("i", sample.tokens), array("f", sample.logprobs)
    return TurnSample(tokens=tokens.tolist(), logprobs=logprobs.tolist(), stop_reason=sample.stop_reason)


def _int32(values: Sequence[int]) -> bytes:
    return array("i", values).tobytes()
