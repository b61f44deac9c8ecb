"""An environment whose tools a model uses in a conversation with a person."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from palestra.environments import EnvironmentSet, EnvSession, StepResult
from palestra.types.rollouts import Message, Task

T = TypeVar("T")

SYSTEM = ("system", "developer")
FREE_TURNS = 10_000


class _Call(Struct, Generic[T]):
    work: Callable[[], Awaitable[T]]
    done: asyncio.Future[T]


class ChatEnvironment:
    """The tools of a task. All calls are made in one asyncio task, which some environments need."""

    def __init__(self, environments: EnvironmentSet, task: Task) -> None:
        self._environments, self._task = environments, task
        self._session: EnvSession | None = None
        self._calls: asyncio.Queue[_Call] = asyncio.Queue()
        self.system: list[Message] = []
        """What the environment tells the model before anything is said."""
        self.question: list[Message] = []
        """The task's own question."""
        self.max_turns = 1

    async def step(self, text: str) -> StepResult:
        """Gives the model's message to the environment. Raises EnvironmentFailure; the next step begins anew then."""
        return await self._run(lambda: self._step(text))

    async def reset(self, *, is_free: bool = True) -> None:
        """Begins the task anew; `is_free`: without its limit of turns. Raises EnvironmentFailure."""
        await self._run(lambda: self._begin(is_free))

    async def _step(self, text: str) -> StepResult:
        session = self._session or await self._begin()
        try:
            result = await session.step(text)
        except BaseException:
            await self._end()
            raise
        if result.done:
            await self._end()
        return result

    async def _begin(self, is_free: bool = True) -> EnvSession:
        await self._end()
        self._session = session = self._environments.open(_unlimited(self._task) if is_free else self._task)
        try:
            messages = await session.init(self._task.prompt)
        except BaseException:
            await self._end()
            raise
        self.max_turns = session.max_turns
        self.system = [one for one in messages if one["role"] in SYSTEM]
        self.question = [one for one in messages if one["role"] not in SYSTEM]
        return session

    async def _end(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _run(self, work: Callable[[], Awaitable[T]]) -> T:
        call = _Call(work, asyncio.get_running_loop().create_future())
        self._calls.put_nowait(call)
        return await call.done

    async def serve(self) -> None:
        """Makes the calls, until it is cancelled."""
        try:
            while True:
                call = await self._calls.get()
                try:
                    result = await call.work()
                except Exception as error:  # boundary: raised where the call was made
                    if not call.done.done():
                        call.done.set_exception(error)
                else:
                    if not call.done.done():
                        call.done.set_result(result)
        finally:
            await self._end()


def _unlimited(task: Task) -> Task:
    """Removes the limit of turns: an environment that ends at its last turn would not answer it."""
    return replace(task, extras={**task.extras, "max_turns": FREE_TURNS})


@asynccontextmanager
async def open_environment(environments: EnvironmentSet, task: Task) -> AsyncIterator[ChatEnvironment]:
    """Raises EnvironmentFailure."""
    environment = ChatEnvironment(environments, task)
    serving = asyncio.create_task(environment.serve(), name=f"environment {task.environment}")
    try:
        await environment.reset()
        yield environment
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
