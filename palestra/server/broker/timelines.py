"""Builds the timeline of an episode from its info and its traces: model calls, tools between them, how attempts
ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import msgspec
from sqlalchemy import Connection

from palestra.episodes.search import EpisodeSearch, RunningSearch
from palestra.server.broker.broker import BoardRefusal, Broker
from palestra.server.broker.deliveries import KeptTurn, agent_of, played_turns
from palestra.server.broker.masking import Masking
from palestra.server.broker.tracing import trace_id_of
from palestra.server.core.owners.callers import AttemptRef
from palestra.store import Store
from palestra.types.episodes import EpisodeInfo
from palestra.types.rollouts import Message
from palestra.types.timelines import AttemptTimeline, CallSpan, EpisodeTimeline, ToolSpan
from palestra.util.json_types import JsonObject


@dataclass(slots=True)
class FoundEpisode:
    episodes: list[EpisodeInfo]
    total: int


class Timelines:
    def __init__(self, broker: Broker, store: Store, masking: Masking):
        self._broker, self._store, self._masking = broker, store, masking

    async def search(self, owner: str, query: EpisodeSearch, *, limit: int, offset: int) -> FoundEpisode:
        """Returns episodes in the order of registration."""
        broker = self._broker
        if query.is_plain:
            page = await broker.do(
                lambda board, _now: board.episodes(owner, run=query.run, state=query.state, limit=limit, offset=offset)
            )
            return FoundEpisode(page.episodes, page.total)
        searching = await self.begin(owner, query, limit=limit, offset=offset)
        while searching.step():  # noqa: ASYNC110 - it waits for nothing: others are served meanwhile
            await asyncio.sleep(0)
        await broker.saving.saved()  # only what is on disk is shown
        return FoundEpisode(searching.found, searching.total)

    async def begin(self, owner: str, search: EpisodeSearch, *, limit: int | None, offset: int) -> RunningSearch:
        return await self._broker.do(lambda board, _now: board.search(owner, search, limit=limit, offset=offset))

    async def of(self, owner: str, episode_id: str) -> bytes:
        """Returns the timeline as JSON, with secrets masked."""
        info, task = await self._broker.do(
            lambda board, _now: (board.find(owner, episode_id), board.task(owner, episode_id))
        )
        attempts = await self._store.read(lambda conn: _attempts(conn, owner, info))
        timeline = await self._masking.of(EpisodeTimeline(episode=info, task=task, attempts=attempts))
        return msgspec.json.encode(timeline)

    async def lines(self, owner: str, searching: RunningSearch) -> AsyncIterator[bytes]:
        """Yields a timeline for each episode. Episodes that are committed meanwhile are left out."""
        is_more = True
        while is_more:
            is_more = searching.step()
            await asyncio.sleep(0)
            for info in searching.take():
                try:
                    yield await self.of(owner, info.episode_id) + b"\n"
                except BoardRefusal as error:
                    if error.status != 404:
                        raise


def _attempts(conn: Connection, owner: str, info: EpisodeInfo) -> list[AttemptTimeline]:
    lost = {loss.attempt: loss for loss in info.losses if loss.attempt > 0}
    attempts: list[AttemptTimeline] = []
    for number in sorted({*lost, info.attempt} - {0}):
        origin, loss = AttemptRef(owner, info.episode_id, number).origin, lost.get(number)
        turns = played_turns(conn, owner, origin)
        calls = [_call(one, turns) for one in turns]
        attempts.append(
            AttemptTimeline(
                attempt=number,
                trace_id=trace_id_of(origin),
                outcome=str(info.state) if loss is None else loss.reason,
                over_at=info.ended_at if loss is None else loss.at,
                calls=calls,
                tools=tool_spans(calls),
            )
        )
    return attempts


def _call(one: KeptTurn, turns: Sequence[KeptTurn]) -> CallSpan:
    turn, facts = one.turn, one.turn.facts
    return CallSpan(
        began_at=one.began_at,
        seconds=facts.prepare_s + facts.sample_s,
        trace_id=one.trace_id,
        turn=turn.number,
        route=facts.route,
        version=facts.version,
        prompt_tokens=len(turn.prompt),
        sampled_tokens=sum(len(sample.tokens) for sample in turn.samples),
        agent=agent_of(facts, turns),
        messages=json.loads(facts.heard or "[]"),
        answers=json.loads(facts.told or "[]"),
    )


@dataclass(slots=True)
class _Open:
    """A tool call without a result yet."""

    place: int
    call_id: str
    trace_id: str


@dataclass(slots=True)
class _Tools:
    spans: list[ToolSpan] = field(default_factory=list)
    waiting: list[_Open] = field(default_factory=list)

    def called(self, call: CallSpan, requested: JsonObject) -> None:
        function, call_id = requested.get("function", {}), requested.get("id", "")
        self.waiting.append(_Open(len(self.spans), call_id, call.trace_id))
        self.spans.append(
            ToolSpan(
                name=function.get("name", ""),
                arguments=function.get("arguments"),
                began_at=call.began_at + call.seconds,
                call_id=call_id,
            )
        )

    def answered(self, call: CallSpan, message: Message) -> None:
        """Matches a result to its call by id, else to the first call of this conversation that waits, because not all
        clients send an id."""
        given = message.get("tool_call_id")
        same = [
            one for one in self.waiting if (one.trace_id if given is None else one.call_id) == (given or call.trace_id)
        ]
        if not same:
            return  # the result of a call that was not sampled here
        self.waiting.remove(same[0])
        span = self.spans[same[0].place]
        self.spans[same[0].place] = msgspec.structs.replace(
            span, seconds=max(call.began_at - span.began_at, 0.0), result=str(message.get("content") or "")
        )


def tool_spans(calls: Sequence[CallSpan]) -> list[ToolSpan]:
    """Returns the spans of tools; `calls` are in the order they began."""
    tools = _Tools()
    for call in calls:
        for message in call.messages:
            if message.get("role") == "tool":
                tools.answered(call, message)
        for answer in call.answers:
            for requested in answer.get("tool_calls") or ():
                tools.called(call, requested)
    return tools.spans
