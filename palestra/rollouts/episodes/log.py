"""The log of a run's played groups, which is read once, in order, and passed to the tasks that wait for a group."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from palestra.episodes import AsyncRun, EpisodeClientError
from palestra.rollouts.episodes.names import GroupNames
from palestra.rollouts.policy_sampler import PolicyError
from palestra.runs.run_state import RunState
from palestra.types.episodes import EpisodeKind, GroupState, PlayedGroup

POLL_S = 1.0
"""How long a read request waits at the server; the end of a run waits for it."""


@contextmanager
def refused_to_us(what: str) -> Iterator[None]:
    try:
        yield
    except EpisodeClientError as error:
        raise PolicyError(f"{what}: {error}") from error


class EpisodeLog:
    """Reads the log. One task runs `follow`. `state` is the run's and changes; groups that it has used are not kept
    here."""

    def __init__(self, run: AsyncRun, names: GroupNames, state: RunState, cursor: int) -> None:
        self._run, self._names, self._state = run, names, state
        self.cursor = cursor
        """Everything up to this cursor is settled."""
        self._read: deque[str] = deque()
        """Ids of the groups after the cursor, in the order of their numbers, which have no gaps."""
        self._early: dict[str, PlayedGroup] = {}
        """Groups that were delivered before they were requested: after a resume, or if they were faster than the answer
        to the registration."""
        self._waiting: dict[str, asyncio.Future[PlayedGroup]] = {}
        self._failure: Exception | None = None
        self._seen: list[PlayedGroup] = []
        """Groups read since the last metrics."""

    async def follow(self) -> None:
        """Reads the log until it is cancelled. If it fails, those who wait fail too."""
        try:
            with refused_to_us(f"the played groups of run {self._run.name!r} cannot be read"):
                while True:
                    after = self.cursor + len(self._read)
                    async for group in self._run.groups(after, wait_s=POLL_S):
                        self._take(group)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        self._failure = error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    async def wait(self, group_id: str) -> PlayedGroup:
        """Waits for a group that was registered, now or before a resume."""
        if (early := self._early.pop(group_id, None)) is not None:
            return early
        if self._failure is not None:
            raise self._failure
        future = self._waiting[group_id] = asyncio.get_running_loop().create_future()
        try:
            return await future
        finally:
            del self._waiting[group_id]

    def settled(self, state: RunState) -> int:
        while self._read and self._names.is_settled(self._read[0], state):
            self._read.popleft()
            self.cursor += 1
        return self.cursor

    async def commit(self, cursor: int) -> None:
        with refused_to_us("the cursor could not be committed"):
            await self._run.commit(cursor)

    def take_metrics(self) -> dict[str, float]:
        seen, self._seen = self._seen, []
        infos = [episode.info for group in seen for episode in group.episodes]
        waits = [one.claimed_at - one.created_at for one in infos if one.claimed_at is not None]
        return {
            "episodes/groups": float(len(seen)),
            "episodes/dropped_groups": float(sum(group.state is GroupState.DROPPED for group in seen)),
            "episodes/lost_attempts": float(sum(len(one.losses) for one in infos)),
            "episodes/players": float(len({one.client_id for one in infos})),
            **({"episodes/wait_mean_s": sum(waits) / len(waits)} if waits else {}),
        }

    def _take(self, group: PlayedGroup) -> None:
        self._read.append(group.group_id)
        if group.kind is EpisodeKind.TRAIN:
            self._seen.append(group)
        future = self._waiting.get(group.group_id)
        if future is not None and not future.done():
            future.set_result(group)
        elif not self._names.is_settled(group.group_id, self._state):
            self._early[group.group_id] = group
