"""Groups for their trainer, with the tokens of exactly the attempts that ended them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace
from sqlalchemy import Connection

from palestra.server.broker.broker import Broker
from palestra.server.core.owners.callers import AttemptRef
from palestra.server.core.turn_trajectories import SeenTrajectory, trajectories_of
from palestra.store import Store
from palestra.store.queries import traces as rows
from palestra.store.queries.traces import TraceTurn, TurnFacts, TurnKey
from palestra.types import StopReason
from palestra.types.episodes import EpisodeTrajectory, PlayedEpisode, PlayedGroup

SIDE = "side"
"""The agent of calls that show no tools, in an episode whose other calls do: titles, summaries."""


@dataclass(frozen=True, slots=True)
class DeliveryReading:
    owner: str
    run: str
    after: int
    limit: int
    version: int | None = None


class Deliveries:
    def __init__(self, broker: Broker, store: Store):
        self._broker, self._store = broker, store

    async def read(self, reading: DeliveryReading, *, wait_s: float, tokens: bool) -> list[PlayedGroup]:
        """Returns groups; empty if nothing came for `wait_s`."""
        broker, groups = self._broker, await self._wait(reading, wait_s)
        version = broker.board.run_info(reading.owner, reading.run).version
        broker.observer.read((reading.owner, reading.run), groups, version, broker.clock.now())
        await broker.saving.saved()  # a number that was sent is never given to another group
        if not tokens or not groups:
            return groups
        return await self._store.read(lambda conn: [_with_tokens(conn, reading.owner, group) for group in groups])

    async def _wait(self, reading: DeliveryReading, wait_s: float) -> list[PlayedGroup]:
        broker, loop = self._broker, asyncio.get_running_loop()
        until = loop.time() + min(wait_s, broker.config.max_wait_s)
        while True:
            groups = broker.apply(
                lambda board, now: board.delivered(
                    reading.owner,
                    reading.run,
                    now,
                    after=reading.after,
                    limit=reading.limit,
                    version=reading.version,
                )
            )
            left_s = until - loop.time()
            if groups or left_s <= 0 or broker.is_stopping:
                return groups
            await broker.has_groups.wait((reading.owner, reading.run), left_s)


def _with_tokens(conn: Connection, owner: str, group: PlayedGroup) -> PlayedGroup:
    return replace(group, episodes=[_played(conn, owner, episode) for episode in group.episodes])


def _played(conn: Connection, owner: str, episode: PlayedEpisode) -> PlayedEpisode:
    attempt = AttemptRef(owner, episode.info.episode_id, episode.info.attempt)
    turns = played_turns(conn, owner, attempt.origin)
    found = trajectories_of(one.turn for one in turns)
    shown = [_shown(one, turns, episode.info.version) for one in found]
    return replace(episode, trajectories=sorted(shown, key=lambda one: bool(one.agent)))  # the main agent's first


@dataclass(frozen=True, slots=True)
class KeptTurn:
    trace_id: str
    turn: TraceTurn
    began_at: float
    """Never earlier than the turns stored before it in its trace, whatever the system's clock said."""


def played_turns(conn: Connection, owner: str, origin: str) -> list[KeptTurn]:
    """Returns the turns of an attempt in the order they began, without those that its player never received. All traces
    are included: calls that are no conversation, such as text completions, begin a trace each."""
    turns: list[KeptTurn] = []
    traces = rows.traces_of(conn, origin, owner)
    for trace in traces:
        began_at = 0.0
        for turn in rows.turns_of(conn, trace.trace_id):
            began_at = max(began_at, turn.facts.started_at)
            turns.append(KeptTurn(trace.trace_id, turn, began_at))
    turns.sort(key=lambda one: one.began_at)
    unanswered = rows.unanswered_of(conn, [trace.trace_id for trace in traces])
    return [one for place, one in enumerate(turns) if not _is_unseen(turns, place, unanswered)]


def _is_unseen(turns: list[KeptTurn], place: int, unanswered: set[TurnKey]) -> bool:
    """Whether the answer never reached the client (the server died, or the client left) and it was requested again. A
    turn that was not requested again may have been received: the server can die between the last byte and the note of
    it."""
    one = turns[place]
    if TurnKey(one.trace_id, one.turn.number) not in unanswered:
        return False
    wholes = [[*one.turn.prompt, *sample.tokens] for sample in one.turn.samples]
    later = [(other.turn.prompt, other.turn.facts.images) for other in turns[place + 1 :]]
    went_on = any(prompt[: len(whole)] == whole for prompt, _ in later for whole in wholes)
    return (one.turn.prompt, one.turn.facts.images) in later and not went_on


def _shown(seen: SeenTrajectory, turns: list[KeptTurn], version: int) -> EpisodeTrajectory:
    """`version`: the version when the episode was claimed, for calls that have none."""
    trajectory = seen.trajectory
    length = len(trajectory.tokens)
    temperatures, versions, inexact = [0.0] * length, [0] * length, [0] * length
    for ref in trajectory.turns:
        turn = turns[ref.call].turn
        start = len(turn.prompt)
        end = start + len(turn.samples[ref.sample].tokens)
        temperatures[start:end] = [turn.facts.temperature] * (end - start)
        versions[start:end] = [version if turn.facts.version is None else turn.facts.version] * (end - start)
        for segment in turn.facts.segments[ref.sample] if turn.facts.segments else ():
            first = start + segment.start
            inexact[first:end] = [int(not segment.is_exact)] * (end - first)
            if segment.version is not None:
                versions[first:end] = [segment.version] * (end - first)
    last = turns[trajectory.turns[-1].call]
    return EpisodeTrajectory(
        tokens=trajectory.tokens,
        loss_mask=trajectory.loss_mask,
        logprobs=trajectory.logprobs,
        temperatures=temperatures,
        versions=versions,
        inexact_mask=inexact if any(inexact) else [],
        trace_id=last.trace_id,
        agent=agent_of(last.turn.facts, turns),
        is_cut=last.turn.samples[trajectory.turns[-1].sample].stop_reason == StopReason.LENGTH,
        images=seen.images,
    )


def agent_of(facts: TurnFacts, turns: Sequence[KeptTurn]) -> str:
    """Returns the agent for which a call was made. `turns`: all calls of the attempt."""
    if facts.agent_name or facts.has_tools or not any(one.turn.facts.has_tools for one in turns):
        return facts.agent_name
    return SIDE
