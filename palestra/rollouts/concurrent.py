"""Plays many rollouts at once and gathers them into groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from palestra.types.rollouts import Group, GroupRequest, Rollout

PlayOne = Callable[[GroupRequest, int], Coroutine[Any, Any, Rollout]]


_cleaning_up: WeakSet[asyncio.Task[Any]] = WeakSet()


@contextmanager
def cleaning_up() -> Iterator[None]:
    """Rollouts that are ended while they are in here are waited for, not cancelled."""
    task = asyncio.current_task()
    assert task is not None
    _cleaning_up.add(task)
    try:
        yield
    finally:
        _cleaning_up.discard(task)


class ConcurrentRollouts:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def play(
        self, requests: Sequence[GroupRequest], play_one: PlayOne, extra: int = 0
    ) -> AsyncGenerator[Group, None]:
        """Yields groups when they are complete, with `extra` rollouts less than were requested. If the caller stops
        iterating, rollouts that are still being played are cancelled."""
        tasks = [self._start(self._play_group(request, play_one, extra), request.id) for request in requests]
        try:
            for group in asyncio.as_completed(tasks):
                yield await group
        finally:
            await _end(tasks)

    async def close(self) -> None:
        await _end(list(self._tasks))

    async def _play_group(self, request: GroupRequest, play_one: PlayOne, extra: int) -> Group:
        indices = range(len(request.seeds))
        work = [(f"{request.id}-{index}", play_one(request, index)) for index in indices]
        rollouts = await self.together(work, len(work) - extra)
        return Group(id=request.id, task=request.task, step=request.step, rollouts=rollouts)

    async def together(
        self, work: Sequence[tuple[str, Coroutine[Any, Any, Rollout]]], wanted: int | None = None
    ) -> list[Rollout]:
        """Plays rollouts at once, each in a task of the name that stands before it. When as many as are wanted have not
        failed (None: all), or if one raises, the others are ended."""
        tasks = [self._start(one, name) for name, one in work]
        wanted = len(tasks) if wanted is None else wanted
        left, ended = set(tasks), list[Rollout]()
        try:
            while left and sum(not rollout.has_failed for rollout in ended) < wanted:
                _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                ended = [task.result() for task in tasks if task.done()]
        finally:
            await _end(tasks)
        chosen = sorted(ended, key=lambda rollout: rollout.has_failed)[:wanted]
        return sorted(chosen, key=lambda rollout: rollout.index)

    def _start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks and waits until each has cleaned up. A task that cleans up already, or is being cancelled, is not
    cancelled: that would interrupt its clean-up."""
    for task in tasks:
        if not task.done() and not task.cancelling() and task not in _cleaning_up:
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
