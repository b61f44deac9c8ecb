"""Traces: the calls of a model that belong together, each as the ids it read and sampled.

A turn keeps what it read since its parent; its prompt is the parent's prompt, the parent's sample, and that. An answer
has a name that its conversation is found by when it goes on.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import Connection, bindparam, delete, func, insert, select, update

from palestra.store.records import Page
from palestra.store.rows import fetch_all, fetch_one, fetch_page
from palestra.store.tables import answers as a
from palestra.store.tables import episodes as e
from palestra.store.tables import traces as t
from palestra.store.tables import turns as u
from palestra.store.tables import unanswered_turns as w
from palestra.types.readiness import make_ready
from palestra.util.json_types import JsonObject


class Trace(Struct, frozen=True, kw_only=True):
    trace_id: str
    owner: str
    model: str
    """As the client called it."""
    created_at: float
    updated_at: float
    turns: int = 0
    origin: str | None = None
    """The attempt of an episode that made it, as "episode_id#attempt". None: of no episode."""


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
    version: int | None = None
    """Version of the weights of an episode's run, as its trainer counts them."""
    temperature: float
    match: str
    """How its prompt was found: new, continued, branched, unmatched, given."""
    started_at: float
    """Seconds since the epoch."""
    prepare_s: float
    """To find and encode its prompt."""
    sample_s: float
    """From there until it was sampled, waiting included."""
    compute_s: float
    """Time that the engine computed."""
    begun: int = 0
    """How many of the prompt's tokens begin the answer, where the request continued its final message."""
    drift: bool = False
    """The chat template would have rewritten what was read and sampled before; the ids that were held stand."""
    cached_tokens: int = 0
    params: JsonObject = {}
    """Sampling parameters, as far as they differ from the defaults."""
    user: str | None = None
    metadata: JsonObject | None = None
    heard: str = ""
    """The messages of a chat that its parent does not have, as JSON."""
    told: str = ""
    """The answers of a chat as messages, one for each sample, as JSON."""


class TraceTurn(Struct, frozen=True, kw_only=True):
    prompt: list[int]
    """All of it."""
    samples: list[TurnSample]
    facts: TurnFacts
    number: int = -1
    """In its trace; given when it is kept."""
    parent: int | None = None
    parent_sample: int | None = None


class KeptAnswer(Struct, frozen=True, kw_only=True):
    """What a sample is found again by."""

    name: bytes
    """A hash of the conversation up to and with it, and of its owner."""
    thoughts: dict[int, str]
    """What was thought in it, by the place of the message, as far as the parent does not know."""


class FoundAnswer(Struct, frozen=True, kw_only=True):
    """A sample with all that is needed to go on from it."""

    number: int
    sample: int
    parent: int | None
    parent_sample: int | None
    read: Sequence[int]
    """Since its parent."""
    tokens: Sequence[int]
    stop_reason: str
    answer: KeptAnswer
    begun: int
    drift: bool


class Purge(Struct, frozen=True, kw_only=True):
    """What of the traces may stay."""

    before: float
    """Those nothing was added to since then go."""
    max_turns: int
    """Turns that each owner may have; the traces that were used longest ago go first."""


class TurnKey(Struct, frozen=True):
    trace_id: str
    number: int


# Built once: this happens for every answer of the model, and building costs as much as running.
_COUNT = select(t.c.turns).where(t.c.trace_id == bindparam("trace"))
_BEGIN, _ADD_TURN, _ADD_ANSWERS = insert(t), insert(u), insert(a)
_WAIT = insert(w)
_ANSWER = delete(w).where(w.c.trace_id == bindparam("trace"), w.c.number == bindparam("turn"))
_GROW = update(t).where(t.c.trace_id == bindparam("trace")).values(turns=bindparam("count"), updated_at=bindparam("at"))


def append_turn(
    conn: Connection,
    trace: Trace,
    turn: TraceTurn,
    read: Sequence[int],
    answers: Sequence[KeptAnswer] = (),
    *,
    is_new: bool = False,
) -> TurnKey:
    """Where it is then. `read`: the end of its prompt that its parent does not have. A turn without a parent begins the
    trace; one whose trace was purged meanwhile begins another, with its whole prompt. `answers`: one for each sample,
    or none. `is_new`: nothing was ever kept under this trace's id."""
    found = None if is_new else conn.execute(_COUNT, {"trace": trace.trace_id}).scalar_one_or_none()
    if found is None:
        if turn.parent is not None:
            trace = msgspec.structs.replace(trace, trace_id=new_trace_id())
            turn, read = msgspec.structs.replace(turn, parent=None, parent_sample=None), turn.prompt
        conn.execute(_BEGIN, msgspec.to_builtins(msgspec.structs.replace(trace, turns=1)))
    else:
        conn.execute(_GROW, {"trace": trace.trace_id, "count": found + 1, "at": trace.updated_at})
    place = {"trace_id": trace.trace_id, "number": found or 0}
    packed = {
        "parent": turn.parent,
        "parent_sample": turn.parent_sample,
        "read": _int32(read),
        "samples": msgspec.msgpack.encode([_packed(sample) for sample in turn.samples]),
        "facts": msgspec.msgpack.encode(turn.facts),
    }
    conn.execute(_ADD_TURN, place | packed)
    if answers:
        named = [{"name": one.name, "thoughts": msgspec.msgpack.encode(one.thoughts)} for one in answers]
        conn.execute(_ADD_ANSWERS, [{**place, "sample": sample, **one} for sample, one in enumerate(named)])
    return TurnKey(**place)


def note_unanswered(conn: Connection, turns: Sequence[TurnKey]) -> None:
    """With their turns, before their answers are given."""
    conn.execute(_WAIT, [{"trace_id": turn.trace_id, "number": turn.number} for turn in turns])


def note_answered(conn: Connection, turns: Sequence[TurnKey]) -> None:
    conn.execute(_ANSWER, [{"trace": turn.trace_id, "turn": turn.number} for turn in turns])


def unanswered_of(conn: Connection, trace_ids: Sequence[str]) -> set[TurnKey]:
    """Turns that nobody may have seen the answer of."""
    found: set[TurnKey] = set()
    for start in range(0, len(trace_ids), MAX_NAMED):
        part = list(trace_ids[start : start + MAX_NAMED])
        found.update(TurnKey(row.trace_id, row.number) for row in conn.execute(select(w).where(w.c.trace_id.in_(part))))
    return found


def new_trace_id() -> str:
    return f"trace-{secrets.token_hex(12)}"


def get_trace(conn: Connection, trace_id: str, owner: str) -> Trace | None:
    return fetch_one(conn, Trace, select(t).where(t.c.trace_id == trace_id, t.c.owner == owner))


def list_traces(conn: Connection, owner: str, *, limit: int, offset: int = 0, origin: str | None = None) -> Page[Trace]:
    """The last used first; all of them, or those of an attempt."""
    query = select(t).where(t.c.owner == owner).order_by(t.c.updated_at.desc(), t.c.trace_id)
    if origin is not None:
        query = query.where(t.c.origin == origin)
    return fetch_page(conn, Trace, query, limit=limit, offset=offset)


def traces_of(conn: Connection, origin: str, owner: str) -> list[Trace]:
    """Those of an attempt, the first made first."""
    query = select(t).where(t.c.origin == origin, t.c.owner == owner).order_by(t.c.created_at, t.c.trace_id)
    return fetch_all(conn, Trace, query)


def turns_of(conn: Connection, trace_id: str) -> list[TraceTurn]:
    """In the order they were kept: a parent comes before its children."""
    turns: list[TraceTurn] = []
    for row in conn.execute(select(u).where(u.c.trace_id == trace_id).order_by(u.c.number)):
        before: list[int] = []
        if row.parent is not None:
            parent = turns[row.parent]
            before = [*parent.prompt, *parent.samples[row.parent_sample].tokens]
        packed = msgspec.msgpack.decode(row.samples, type=list[_PackedSample])
        turns.append(
            TraceTurn(
                number=row.number,
                parent=row.parent,
                parent_sample=row.parent_sample,
                prompt=[*before, *array("i", row.read)],
                samples=[_unpacked(sample) for sample in packed],
                facts=msgspec.msgpack.decode(row.facts, type=TurnFacts),
            )
        )
    return turns


def answers_of(conn: Connection, trace_id: str) -> list[FoundAnswer]:
    """Those that have a name, in the order they were kept: a parent comes before its children."""
    names: dict[int, list[Any]] = {}
    for row in conn.execute(select(a).where(a.c.trace_id == trace_id).order_by(a.c.number, a.c.sample)):
        names.setdefault(row.number, []).append(row)
    found: list[FoundAnswer] = []
    for row in conn.execute(select(u).where(u.c.trace_id == trace_id).order_by(u.c.number)):
        samples = msgspec.msgpack.decode(row.samples, type=list[_PackedSample])
        facts = msgspec.msgpack.decode(row.facts, type=TurnFacts)
        found += [
            FoundAnswer(
                number=row.number,
                sample=named.sample,
                parent=row.parent,
                parent_sample=row.parent_sample,
                read=array("i", row.read),
                tokens=array("i", samples[named.sample].tokens),
                stop_reason=samples[named.sample].stop_reason,
                answer=KeptAnswer(
                    name=named.name, thoughts=msgspec.msgpack.decode(named.thoughts, type=dict[int, str])
                ),
                begun=facts.begun,
                drift=facts.drift,
            )
            for named in names.get(row.number, ())
        ]
    return found


def traces_named(conn: Connection, names: Sequence[bytes], *, most: int) -> list[tuple[bytes, str]]:
    """Traces that have an answer of one of the names: in their order, the last used first, `most` for each name."""
    rank = func.row_number().over(partition_by=a.c.name, order_by=(t.c.updated_at.desc(), t.c.trace_id))
    found: list[tuple[bytes, str]] = []
    for start in range(0, len(names), MAX_NAMED):
        part = list(names[start : start + MAX_NAMED])
        ranked = select(a.c.name, a.c.trace_id, rank.label("rank")).join(t, t.c.trace_id == a.c.trace_id)
        rows = ranked.where(a.c.name.in_(part)).subquery()
        query = select(rows.c.name, rows.c.trace_id).where(rows.c.rank <= most).order_by(rows.c.rank)
        found += [(bytes(row.name), row.trace_id) for row in conn.execute(query)]
    order = {name: place for place, name in enumerate(names)}
    return sorted(found, key=lambda pair: order[pair[0]])


def purge_traces(conn: Connection, purge: Purge) -> int:
    """How many went. Those of episodes that are not committed stay."""
    newer = func.sum(t.c.turns).over(partition_by=t.c.owner, order_by=(t.c.updated_at.desc(), t.c.trace_id))
    ranked = select(t.c.trace_id, t.c.updated_at, t.c.origin, newer.label("up_to_here")).subquery()
    is_over = (ranked.c.updated_at < purge.before) | (ranked.c.up_to_here > purge.max_turns)
    over = list(conn.execute(select(ranked.c.trace_id, ranked.c.origin).where(is_over)))
    played = _still_here(conn, {_episode_of(row.origin) for row in over if row.origin is not None})
    gone = [row.trace_id for row in over if row.origin is None or _episode_of(row.origin) not in played]
    for start in range(0, len(gone), MAX_NAMED):
        part = gone[start : start + MAX_NAMED]
        conn.execute(delete(w).where(w.c.trace_id.in_(part)))
        conn.execute(delete(a).where(a.c.trace_id.in_(part)))
        conn.execute(delete(u).where(u.c.trace_id.in_(part)))
        conn.execute(delete(t).where(t.c.trace_id.in_(part)))
    return len(gone)


def _episode_of(origin: str) -> str:
    return origin.rpartition("#")[0]


def _still_here(conn: Connection, episode_ids: set[str]) -> set[str]:
    """Those that their trainer has not committed: it may read their tokens yet."""
    names, found = sorted(episode_ids), set[str]()
    for start in range(0, len(names), MAX_NAMED):
        part = names[start : start + MAX_NAMED]
        found.update(conn.execute(select(e.c.episode_id).where(e.c.episode_id.in_(part))).scalars())
    return found


MAX_NAMED = 500  # in one statement: SQLite may be built for 999


class _PackedSample(Struct, frozen=True, array_like=True):
    tokens: bytes
    logprobs: bytes
    stop_reason: str


make_ready(__name__)


def _packed(sample: TurnSample) -> _PackedSample:
    return _PackedSample(_int32(sample.tokens), array("f", sample.logprobs).tobytes(), sample.stop_reason)


def _unpacked(sample: _PackedSample) -> TurnSample:
    tokens, logprobs = array("i", sample.tokens), array("f", sample.logprobs)
    return TurnSample(tokens=tokens.tolist(), logprobs=logprobs.tolist(), stop_reason=sample.stop_reason)


def _int32(values: Sequence[int]) -> bytes:
    return array("i", values).tobytes()
