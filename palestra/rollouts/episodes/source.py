"""A source of rollouts that are registered as episodes at the server and played by any player."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count
from typing import Protocol

from msgspec import Struct

from palestra.config.train import EpisodeRollouts
from palestra.episodes import AsyncRun, EpisodeApiError, EpisodeClientError, NewGroup
from palestra.rollouts.episodes.log import EpisodeLog, refused_to_us
from palestra.rollouts.episodes.pictures import read_files
from palestra.rollouts.episodes.reader import EpisodeReader
from palestra.rollouts.policy_sampler import PolicyError, PolicySampler
from palestra.rollouts.sources import RolloutSourceError
from palestra.types.episodes import GROUP_SIZE, EpisodeKind, GroupState, OnLoss, PlayedGroup, Registered
from palestra.types.rollouts import Group, GroupRequest, Task

NOT_NEEDED = "the trainer no longer needs it"
DIFFERENT, MISSING = 409, 404


class Publisher(Protocol):
    async def publish(self, sampler: PolicySampler) -> None:
        """Makes the server answer model calls with these weights from now on."""
        ...


class EpisodeContext(Struct, frozen=True):
    """The context that training and evaluation share."""

    run: AsyncRun
    log: EpisodeLog
    reader: EpisodeReader
    publisher: Publisher
    packed: Callable[[Task], Task]
    """Adds to a task all that players need."""
    config: EpisodeRollouts
    unwanted: set[str]
    """Groups that were given up, to be cancelled with the next registration. They are not cancelled when the run ends,
    because it may be resumed."""


class EpisodeSource:
    def __init__(
        self, context: EpisodeContext, kind: EpisodeKind, name: Callable[[GroupRequest, int], str], tags: dict[str, str]
    ) -> None:
        """`name` returns the id of a request's group in its first, second … generation."""
        self._context, self._kind, self._name, self._tags = context, kind, name, tags

    async def play(self, requests: Sequence[GroupRequest], sampler: PolicySampler) -> AsyncIterator[Group]:
        await self._context.publisher.publish(sampler)
        missing = {request.id: self._name(request, 1) for request in requests}
        tasks: list[asyncio.Task[Group]] = []
        try:
            missing = dict(zip(missing, await self._begin(requests), strict=True))
            for request in requests:
                work = self._finish(request, missing, sampler)
                tasks.append(asyncio.create_task(work, name=missing[request.id]))
            for group in asyncio.as_completed(tasks):
                yield await group
        except asyncio.CancelledError:
            self._context.unwanted.update(missing.values())
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Does nothing: no resources are held between the calls of `play`."""

    async def _begin(self, requests: Sequence[GroupRequest]) -> list[str]:
        await self._cancel_unwanted()
        try:
            registered = await self._register([self._group(request, 1) for request in requests])
        except EpisodeApiError:
            return [await self._begin_one(request, 1) for request in requests]
        return [
            await self._begin_one(request, 2) if one.is_committed else one.group_id
            for request, one in zip(requests, registered, strict=True)
        ]

    async def _begin_one(self, request: GroupRequest, generation: int) -> str:
        """Registers the first generation that is neither committed nor known with other content. After a resume from an
        older checkpoint, or with changed settings, a group is requested again that was already played."""
        for number in count(generation):
            group = self._group(request, number)
            try:
                (registered,) = await self._register([group])
            except EpisodeApiError:
                await cancel_groups(self._context.run, [group.group_id])
                continue
            if not registered.is_committed:
                return registered.group_id
        raise AssertionError

    async def _register(self, groups: list[NewGroup]) -> list[Registered]:
        """Raises EpisodeApiError if one of the groups is known with other content."""
        try:
            return await self._context.run.register(groups)
        except EpisodeApiError as error:
            if error.status != DIFFERENT:
                raise PolicyError(f"groups could not be registered: {error}") from error
            raise
        except EpisodeClientError as error:
            raise PolicyError(f"groups could not be registered: {error}") from error
        except (TypeError, ValueError) as error:
            tasks = ", ".join(group.task.id for group in groups)[:200]
            raise RolloutSourceError(f"a task cannot be sent to players ({error}); it is one of {tasks}") from error

    async def _finish(self, request: GroupRequest, missing: dict[str, str], sampler: PolicySampler) -> Group:
        """`missing` maps requests to the groups that are waited for."""
        played = await self._context.log.wait(missing[request.id])
        for generation in count(2):
            if not _was_given_up(played):
                break
            missing[request.id] = await self._begin_one(request, generation)
            played = await self._context.log.wait(missing[request.id])
        del missing[request.id]
        with refused_to_us("the pictures of a played group cannot be read"):
            files = await read_files(self._context.run, played)
        return self._context.reader.group(played, request, sampler.version, files)

    async def _cancel_unwanted(self) -> None:
        if not self._context.unwanted:
            return
        unwanted = sorted(self._context.unwanted)
        self._context.unwanted.clear()
        await cancel_groups(self._context.run, unwanted)

    def _group(self, request: GroupRequest, generation: int) -> NewGroup:
        config, size = self._context.config, len(request.seeds)
        is_train = self._kind is EpisodeKind.TRAIN
        return NewGroup(
            group_id=self._name(request, generation),
            task=self._context.packed(request.task),
            size=size,
            count=size + config.oversample if is_train else None,
            on_loss=OnLoss(config.on_loss) if is_train else OnLoss.SHRINK,
            min_size=None if is_train else 1,
            kind=self._kind,
            seeds=request.seeds,
            deadline_s=config.deadline_s,
            tags={**self._tags, GROUP_SIZE: str(size)},
        )


def _was_given_up(played: PlayedGroup) -> bool:
    return played.state is GroupState.DROPPED and NOT_NEEDED in played.reason


async def cancel_groups(run: AsyncRun, group_ids: Sequence[str]) -> None:
    """Cancels groups one by one, because those that were never registered, or are committed, do not exist."""
    for group_id in group_ids:
        with refused_to_us("a group could not be cancelled"):
            try:
                await run.cancel(group_ids=[group_id], reason=NOT_NEEDED)
            except EpisodeApiError as error:
                if error.status != MISSING:
                    raise
