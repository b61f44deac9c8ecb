"""Traces: the calls of a model that belong together, each as the token ids it read and sampled.

A turn stores what it read since its parent; its prompt is the parent's prompt, the parent's sample and this. Each
answer has a name (a hash), by which it is found when its conversation continues.
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
from palestra.store.tables import responses as r
from palestra.store.tables import traces as t
from palestra.store.tables import turns as u
from palestra.store.tables import unanswered_turns as w
from palestra.types.pictures import PlacedImage
from palestra.types.readiness import make_ready
from palestra.util.json_types import JsonObject


class Trace(Struct, frozen=True, kw_only=True):
    trace_id: str
    owner: str
    model: str
    """The name of the model as the client gave it."""
    created_at: float
    updated_at: float
    turns: int = 0
    origin: str | None = None
    """The attempt at an episode that made the call, as "episode_id#attempt"; None if it belongs to no episode."""


class TurnSample(Struct, frozen=True, kw_only=True):
    tokens: list[int]
    logprobs: list[float]
    """Log-probabilities under the distribution that was sampled from, at the turn's temperature; one for each token."""
    stop_reason: str


class CallSegment(Struct, frozen=True, kw_only=True):
    """Tokens of a sample, from `start` to the next segment, that other weights drew than those before."""

    start: int
    weights: str
    """As in `TurnFacts`."""
    version: int | None = None
    """As in `TurnFacts`."""
    is_exact: bool = True
    """False: they saw keys and values of older weights."""


AGENT = "agent"
"""Key in the `metadata` of a call: for which of several agents it is."""


class TurnFacts(Struct, frozen=True, kw_only=True):
    """What is known about a call in addition to its token ids."""

    response_id: str
    route: str
    base_model: str
    weights: str
    """Identifies the weights exactly: two turns with the same text here were sampled from the same weights."""
    version: int | None = None
    """Version of the weights of an episode's run, as its trainer counts them."""
    segments: list[list[CallSegment]] = []
    """For each sample, where newer weights took over while it was sampled; empty if none did."""
    temperature: float
    match: str
    """How the prompt was found: new, continued, branched, unmatched, given."""
    started_at: float
    """Seconds since the epoch."""
    prepare_s: float
    """Time to find and encode the prompt."""
    sample_s: float
    """Time from then until the answer was sampled, including waiting."""
    compute_s: float
    """Time that the engine spent computing."""
    begun: int = 0
    """How many tokens at the end of the prompt begin the answer, if the request continued its final message."""
    drift: bool = False
    """Whether the chat template would have rewritten what was read and sampled before. The stored ids were used all the
    same."""
    cached_tokens: int = 0
    params: JsonObject = {}
    """Sampling parameters that differ from the defaults."""
    user: str | None = None
    metadata: JsonObject | None = None
    client: str = ""
    """Name and version of the program that made the call, from its User-Agent."""
    agent: str = ""
    """For which of several agents the call was made, as its metadata or the client's headers say."""
    has_tools: bool = False
    """Whether the prompt showed tools."""
    ignored: list[str] = []
    """Fields and tools of the request that were ignored."""
    images: list[PlacedImage] = []
    """Where pictures stand in the whole prompt."""
    heard: str = ""
    """The messages of a chat that its parent does not have, as JSON."""
    told: str = ""
    """The answers of a chat as messages, one for each sample, as JSON."""

    @property
    def agent_name(self) -> str:
        """The agent; turns of older versions have it in their metadata only."""
        return self.agent or str((self.metadata or {}).get(AGENT, ""))


class TraceTurn(Struct, frozen=True, kw_only=True):
    prompt: list[int]
    """The whole prompt."""
    samples: list[TurnSample]
    facts: TurnFacts
    number: int = -1
    """Number of the turn within its trace, given when it is stored."""
    parent: int | None = None
    parent_sample: int | None = None


class KeptAnswer(Struct, frozen=True, kw_only=True):
    """The key by which a sample is found again."""

    name: bytes
    """A hash of the owner and of the conversation up to and including this answer."""
    thoughts: dict[int, str]
    """Reasoning by index of the message, as far as the parent does not have it."""


class FoundAnswer(Struct, frozen=True, kw_only=True):
    """A sample with all that is needed to continue from it."""

    number: int
    sample: int
    parent: int | None
    parent_sample: int | None
    read: Sequence[int]
    """Token ids read since the parent."""
    tokens: Sequence[int]
    stop_reason: str
    answer: KeptAnswer
    begun: int
    drift: bool


class Purge(Struct, frozen=True, kw_only=True):
    """Which traces may stay."""

    before: float
    """Traces to which nothing was added since this time are deleted."""
    max_turns: int
    """How many turns each owner may keep; the least recently used traces are deleted first."""


class TurnKey(Struct, frozen=True):
    trace_id: str
    number: int


# Built once: this runs for every answer of the model, and building the statement costs as much as running it.
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
    """Stores a turn and returns where it is. `read` is the end of its prompt that its parent does not have. A turn
    without a parent begins the trace; one whose trace was purged meanwhile begins another, with its whole prompt.
    `answers` has one entry for each sample, or none. `is_new` says that nothing was ever stored under this trace's id.
    """
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
    """Notes turns as unanswered; written together with the turns, before their answers are sent."""
    conn.execute(_WAIT, [{"trace_id": turn.trace_id, "number": turn.number} for turn in turns])


def note_answered(conn: Connection, turns: Sequence[TurnKey]) -> None:
    conn.execute(_ANSWER, [{"trace": turn.trace_id, "turn": turn.number} for turn in turns])


def unanswered_of(conn: Connection, trace_ids: Sequence[str]) -> set[TurnKey]:
    """Returns the turns whose answers may not have reached their client."""
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
    """Returns traces, the most recently used first; all of them, or those of one attempt."""
    query = select(t).where(t.c.owner == owner).order_by(t.c.updated_at.desc(), t.c.trace_id)
    if origin is not None:
        query = query.where(t.c.origin == origin)
    return fetch_page(conn, Trace, query, limit=limit, offset=offset)


def traces_of(conn: Connection, origin: str, owner: str) -> list[Trace]:
    """Returns the traces of an attempt, in order of creation."""
    query = select(t).where(t.c.origin == origin, t.c.owner == owner).order_by(t.c.created_at, t.c.trace_id)
    return fetch_all(conn, Trace, query)


def turns_of(conn: Connection, trace_id: str) -> list[TraceTurn]:
    """Returns the turns of a trace in the order they were stored, so that a parent comes before its children."""
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


def messages_of(conn: Connection, turn: TurnKey) -> list[JsonObject]:
    """Returns the messages of a chat up to and including the answer of a turn, which has one sample."""
    messages: list[JsonObject] = []
    number, sample = turn.number, 0
    while number is not None:
        row = conn.execute(
            select(u.c.facts, u.c.parent, u.c.parent_sample).where(u.c.trace_id == turn.trace_id, u.c.number == number)
        ).one()
        facts = msgspec.msgpack.decode(row.facts, type=TurnFacts)
        heard, told = msgspec.json.decode(facts.heard or "[]"), msgspec.json.decode(facts.told or "[]")
        messages = [*heard, told[sample], *messages]
        number, sample = row.parent, row.parent_sample
    return messages


def answers_of(conn: Connection, trace_id: str) -> list[FoundAnswer]:
    """Returns the answers that have a name, in the order they were stored, so that a parent comes before its
    children."""
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
    """Returns traces that have an answer with one of the names: in the order of the names, the most recently used
    first, at most `most` for each name."""
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
    """Deletes traces and returns how many."""
    return delete_traces(conn, traces_to_purge(conn, purge))


def traces_to_purge(conn: Connection, purge: Purge) -> list[Trace]:
    """Returns the traces that may not stay. Traces of episodes that are not committed may."""
    newer = func.sum(t.c.turns).over(partition_by=t.c.owner, order_by=(t.c.updated_at.desc(), t.c.trace_id))
    ranked = select(t.c.trace_id, t.c.updated_at, t.c.origin, newer.label("up_to_here")).subquery()
    is_over = (ranked.c.updated_at < purge.before) | (ranked.c.up_to_here > purge.max_turns)
    over = fetch_all(conn, Trace, select(t).where(t.c.trace_id.in_(select(ranked.c.trace_id).where(is_over))))
    played = _still_here(conn, {_episode_of(trace.origin) for trace in over if trace.origin is not None})
    return [trace for trace in over if trace.origin is None or _episode_of(trace.origin) not in played]


def delete_traces(conn: Connection, traces: Sequence[Trace]) -> int:
    """Deletes traces to which nothing was added since they were read, and returns how many."""
    deleted = 0
    for start in range(0, len(traces), MAX_NAMED):
        read_at = {trace.trace_id: trace.updated_at for trace in traces[start : start + MAX_NAMED]}
        found = conn.execute(select(t.c.trace_id, t.c.updated_at).where(t.c.trace_id.in_(read_at)))
        part = [row.trace_id for row in found if row.updated_at == read_at[row.trace_id]]
        conn.execute(delete(w).where(w.c.trace_id.in_(part)))
        conn.execute(delete(r).where(r.c.trace_id.in_(part)))
        conn.execute(delete(a).where(a.c.trace_id.in_(part)))
        conn.execute(delete(u).where(u.c.trace_id.in_(part)))
        conn.execute(delete(t).where(t.c.trace_id.in_(part)))
        deleted += len(part)
    return deleted


def _episode_of(origin: str) -> str:
    return origin.rpartition("#")[0]


def _still_here(conn: Connection, episode_ids: set[str]) -> set[str]:
    """Returns the episodes that their trainer has not committed: it may still read their tokens."""
    names, found = sorted(episode_ids), set[str]()
    for start in range(0, len(names), MAX_NAMED):
        part = names[start : start + MAX_NAMED]
        found.update(conn.execute(select(e.c.episode_id).where(e.c.episode_id.in_(part))).scalars())
    return found


MAX_NAMED = 500  # names in one statement: SQLite may be built with a limit of 999


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
