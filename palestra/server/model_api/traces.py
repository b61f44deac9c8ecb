"""Stores calls as traces before they are answered, and returns and exports them to their owner."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec
from sqlalchemy import Connection

from palestra.chat.canonical import Message
from palestra.chat.pictures import SCHEME, with_parts
from palestra.chat.prompt_records import AnswerKey, CachedTurn, Prompt
from palestra.server.broker.masking import Masking
from palestra.server.broker.model_calls import EpisodeCalls
from palestra.server.core.errors import ApiError
from palestra.server.core.owners.callers import Caller
from palestra.server.core.turn_trajectories import SeenTrajectory, trajectories_of
from palestra.server.core.wire_errors import shown
from palestra.server.model_api.delivery_acks import DeliveryAcks
from palestra.server.model_api.json_text import dumps
from palestra.store import Store
from palestra.store.queries import traces as rows
from palestra.store.queries.traces import KeptAnswer, Trace, TraceTurn, TurnFacts, TurnKey, TurnSample
from palestra.types.sampling import SampledSequence
from palestra.util.json_types import JsonObject

EXPORTED_AT_ONCE = 16  # traces in memory while an export is written


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One prompt and what was sampled from it."""

    prompt: Sequence[int]
    read: Sequence[int]
    """The part of the prompt that its parent does not have."""
    parent: CachedTurn | None
    sequences: Sequence[SampledSequence]
    facts: TurnFacts
    answers: Sequence[AnswerKey] = ()
    """For each sequence, the key by which its conversation is found when it continues."""

    @classmethod
    def of_chat(
        cls, prompt: Prompt, sequences: Sequence[SampledSequence], messages: Sequence[Message], facts: TurnFacts
    ) -> TracedCall:
        """`messages` are the sequences as the client receives them."""
        return cls(
            prompt=prompt.ids,
            read=prompt.read,
            parent=prompt.parent,
            sequences=sequences,
            facts=msgspec.structs.replace(
                facts,
                begun=prompt.begun,
                drift=prompt.drift,
                heard=dumps(with_parts(prompt.messages)).decode(),
                told=dumps(list(messages)).decode(),
            ),
            answers=[prompt.answered(message) for message in messages],
        )


PICTURE_PART = '"image_url":{"url":"picture:'
"""In the JSON of a message that has a picture."""


class CallTraces:
    def __init__(self, store: Store, episodes: EpisodeCalls, delivery_acks: DeliveryAcks, masking: Masking):
        self._store, self._episodes, self._delivery_acks = store, episodes, delivery_acks
        self._masking = masking

    async def keep(self, caller: Caller, model: str, calls: Sequence[TracedCall]) -> list[TurnKey]:
        """Stores calls; they are on disk when this returns. All are in one trace: the parent's, or a new one."""
        attempt = caller.attempt
        if attempt is not None:
            self._episodes.check(attempt)  # from here to the writer there is no await
            self._episodes.sampled(attempt, sum(len(s.tokens) for call in calls for s in call.sequences))
        parent, now = calls[0].parent, time.time()
        trace_id = rows.new_trace_id() if parent is None else parent.place.trace_id
        trace = Trace(
            trace_id=trace_id,
            owner=caller.owner,
            model=model,
            created_at=now,
            updated_at=now,
            origin=None if attempt is None else attempt.origin,
        )

        def write(conn: Connection) -> list[TurnKey]:
            keys = []
            for number, call in enumerate(calls):
                answers = [KeptAnswer(name=one.name, thoughts=dict(one.thoughts)) for one in call.answers]
                is_new = parent is None and number == 0
                keys.append(rows.append_turn(conn, trace, _turn(call), call.read, answers, is_new=is_new))
            if attempt is not None:
                rows.note_unanswered(conn, keys)
            return keys

        keys = await self._store.write(write)
        if attempt is not None:
            self._delivery_acks.expect(calls[0].facts.response_id, attempt, keys)
            for call in calls:
                sampled = sum(len(one.tokens) for one in call.sequences)
                self._episodes.answered(caller, call.facts, len(call.prompt), sampled)
        return keys

    async def page(self, caller: Caller, limit: int, offset: int, origin: str | None) -> JsonObject:
        """`origin` is an attempt at an episode, as episode_id#attempt."""
        found = await self._store.read(
            lambda c: rows.list_traces(c, caller.owner, limit=limit, offset=offset, origin=origin)
        )
        return {"object": "list", "data": [_about(trace) for trace in found.items], "total": found.total}

    async def one(self, caller: Caller, trace_id: str) -> JsonObject:
        trace, turns = await self._read(caller, trace_id)
        return await self._whole(trace, turns)

    async def trajectories(self, caller: Caller, trace_id: str) -> JsonObject:
        _, turns = await self._read(caller, trace_id)
        if any(PICTURE_PART in turn.facts.heard and not turn.facts.images for turn in turns):
            detail = (
                "this conversation has pictures, and was kept by a version that did not note where they stand: tokens "
                "alone would train on a blind prompt"
            )
            raise ApiError(400, detail, param="trace_id", code="unsupported")
        found = [_with_images(one) for one in trajectories_of(turns)]
        return {"object": "list", "trace_id": trace_id, "data": found}

    async def export(self, caller: Caller, limit: int, offset: int, origin: str | None) -> AsyncIterator[bytes]:
        """Yields a line for each trace. Traces that are purged meanwhile are left out."""
        for start in range(offset, offset + limit, EXPORTED_AT_ONCE):
            size = min(EXPORTED_AT_ONCE, offset + limit - start)
            page = await self._store.read(
                lambda c, start=start, size=size: rows.list_traces(
                    c, caller.owner, limit=size, offset=start, origin=origin
                )
            )
            for trace in page.items:
                turns = await self._store.read(lambda c, name=trace.trace_id: rows.turns_of(c, name))
                if turns:
                    yield msgspec.json.encode(await self._whole(trace, turns)) + b"\n"
            if len(page.items) < size:
                return

    async def lines(self, caller: Caller, trace_id: str) -> bytes:
        """Returns a line for each turn."""
        trace, turns = await self._read(caller, trace_id)
        turns_out = ({"trace_id": trace.trace_id, **one} for one in await self._with_answers(turns))
        return b"".join(msgspec.json.encode(line) + b"\n" for line in turns_out)

    async def _whole(self, trace: Trace, turns: Sequence[TraceTurn]) -> JsonObject:
        return _about(trace) | {"turns": await self._with_answers(turns)}

    async def _with_answers(self, turns: Sequence[TraceTurn]) -> list[JsonObject]:
        """Returns the turns with secrets masked in their messages; tokens are not changed."""
        turns_out = [msgspec.to_builtins(turn) for turn in turns]
        facts = [one.pop("facts") for one in turns_out]
        spoken = [
            {name: json.loads(one.pop(field) or "[]") for name, field in (("messages", "heard"), ("answers", "told"))}
            for one in facts
        ]
        shown = await self._masking.of(spoken)
        return [
            {"number": one.pop("number"), **f, **s, **one} for one, f, s in zip(turns_out, facts, shown, strict=True)
        ]

    async def _read(self, caller: Caller, trace_id: str) -> tuple[Trace, list[TraceTurn]]:
        def read(conn: Connection) -> tuple[Trace | None, list[TraceTurn]]:
            trace = rows.get_trace(conn, trace_id, caller.owner)
            return trace, rows.turns_of(conn, trace_id) if trace is not None else []

        trace, turns = await self._store.read(read)
        if trace is None:
            raise ApiError(404, f"no such trace: {shown(trace_id)}", param="trace_id", code="not_found")
        return trace, turns


def _turn(call: TracedCall) -> TraceTurn:
    place = None if call.parent is None else call.parent.place
    return TraceTurn(
        prompt=list(call.prompt),
        samples=[
            TurnSample(tokens=s.tokens, logprobs=s.logprobs, stop_reason=s.stop_reason.value) for s in call.sequences
        ],
        facts=call.facts,
        parent=None if place is None else place.turn,
        parent_sample=None if place is None else place.sample,
    )


def _with_images(seen: SeenTrajectory) -> JsonObject:
    images = [
        {"start": image.start, "tokens": seen.rows(place), "url": f"{SCHEME}{image.digest}"}
        for place, image in enumerate(seen.images)
    ]
    return {**msgspec.to_builtins(seen.trajectory), "images": images}


def _about(trace: Trace) -> JsonObject:
    """Returns a trace without its owner, who is the caller."""
    return {
        "id": trace.trace_id,
        "object": "trace",
        "model": trace.model,
        "created_at": trace.created_at,
        "updated_at": trace.updated_at,
        "turn_count": trace.turns,
        **({} if trace.origin is None else {"origin": trace.origin}),
    }
