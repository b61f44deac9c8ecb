"""A source whose groups are graded by judges before they are returned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from palestra.environments.judging import Judges
from palestra.rollouts.policy_sampler import PolicySampler
from palestra.rollouts.sources import RolloutSource
from palestra.types.rollouts import Group, GroupRequest


def judged(source: RolloutSource, judges: Judges) -> RolloutSource:
    """Returns the source itself if no environment of the run has a judge."""
    return source if judges.are_idle else JudgedRollouts(source, judges)


class JudgedRollouts:
    def __init__(self, source: RolloutSource, judges: Judges) -> None:
        self._source, self._judges = source, judges

    async def play(self, requests: Sequence[GroupRequest], sampler: PolicySampler) -> AsyncGenerator[Group, None]:
        """Groups are judged as they come, while others are still played. Raises JudgeError."""
        ended: asyncio.Queue[asyncio.Task[Group | None]] = asyncio.Queue()
        grading: list[asyncio.Task[Group | None]] = []

        async def feed() -> None:
            async for group in self._source.play(requests, sampler):
                grading.append(asyncio.create_task(self._graded(group), name=f"judging {group.id}"))
                grading[-1].add_done_callback(ended.put_nowait)

        feeding: asyncio.Task[Group | None] = asyncio.create_task(feed(), name="playing to be judged")
        feeding.add_done_callback(ended.put_nowait)
        yielded = 0
        try:
            while not feeding.done() or yielded < len(grading):
                if (group := (await ended.get()).result()) is not None:
                    yielded += 1
                    yield group
            feeding.result()
        finally:
            for task in (feeding, *grading):
                task.cancel()
            await asyncio.gather(feeding, *grading, return_exceptions=True)

    async def close(self) -> None:
        await self._source.close()

    async def _graded(self, group: Group) -> Group | None:
        await self._judges.grade(group)
        return group
