"""An async handle of one environment, ours or a user's: it answers in time and in the right form, or it has failed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, TypeGuard

from msgspec import Struct

from palestra.environments.errors import EnvironmentFailure
from palestra.environments.guarded_calls import GuardedCaller, error_text
from palestra.environments.snapshots import (
    NotCopyable,
    RepeatedTurns,
    TurnLog,
    WorldSnapshot,
    check_copyable,
    copied,
    digest,
)
from palestra.environments.step_results import (
    StepResult,
    conversation_of,
    numbers_of,
    reward_of,
    shown,
    step_result_of,
    verdict_of,
)
from palestra.types.openai import ChatTool
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonObject

__all__ = ["Deferred", "EnvSession", "StepResult"]

log = logging.getLogger(__name__)

_without_metrics: set[str] = set()
"""Environments that were warned about: once each, not once per rollout."""


NOT_REPEATED = "so its turns cannot be repeated (rollout.branch.replay)"


class Deferred(Struct, frozen=True):
    """An environment that `EnvSession.init` or `restore` will make: constructors may fail and be slow."""

    make: Callable[[], Any]
    name: str
    is_async: bool = False
    """Whether it is made in the event loop's thread, as environments with async methods may expect; else in the
    pool."""


class EnvSession:
    """One episode: `init` or `restore`, `step` until done, `close`. After a failure only `close` is allowed."""

    def __init__(self, env: object, pool: Executor, timeout_s: float, max_turns: int | None = None) -> None:
        """`env` is an environment or a Deferred one; by default `max_turns` is the environment's own."""
        self._env = env
        self._name = env.name if isinstance(env, Deferred) else type(env).__name__
        self._caller = GuardedCaller(pool, timeout_s)
        self._max_turns = max_turns
        self._ended: str | None = None
        """Why there are no more steps."""
        self._is_closed = False
        self._log: TurnLog | None = None

    @property
    def max_turns(self) -> int:
        """The limit of turns; that of a Deferred environment is known after `init`."""
        if self._max_turns is not None:
            return self._max_turns
        own = getattr(self._env, "max_turns", 1)
        return own if isinstance(own, int) and own > 0 else 1

    async def init(self, prompt: list[Message]) -> list[Message]:
        """Returns the initial conversation. Raises EnvironmentFailure."""
        with self._failure_is_final():
            if isinstance(self._env, Deferred):
                self._env = await self._make(self._env)
            conversation = conversation_of(await self._call("init", self._copied(prompt)))
        if self._log is not None:
            self._log.begin(prompt, conversation)
        return conversation

    async def step(self, action: str) -> StepResult:
        """Makes a step. Raises EnvironmentFailure, also for an invalid result or a reward that is not a finite
        number."""
        if self._ended:
            raise EnvironmentFailure(f"{self._name}: {self._ended}, no more steps")
        with self._failure_is_final():
            result = step_result_of(await self._call("step", action))
        if result.done:
            self._ended = "the episode is over"
        if self._log is not None:
            self._log.add(action, _answer(result))
        return result

    def note_turns(self) -> None:
        """Makes `snapshot` return the turns so far where the environment cannot be copied. Call it before `init`."""
        self._log = TurnLog()

    async def snapshot(self) -> WorldSnapshot:
        """Returns a copy of the environment's state, which goes on by itself as before. Raises NotCopyable."""
        try:
            return await self._copy()
        except NotCopyable:
            if self._log is None:
                raise
            return WorldSnapshot(repeated=self._log.repeated)

    async def _copy(self) -> WorldSnapshot:
        try:
            if self._method("snapshot") is None:
                check_copyable(self._env, self._name)
                return WorldSnapshot(None, await self._caller.call(f"copying {self._name}", copied, self._env))
            if self._method("restore") is None:
                raise NotCopyable(f"{self._name} has a snapshot, but no restore(data)")
            data = await self._call("snapshot")
        except EnvironmentFailure as error:
            raise NotCopyable(str(error)) from None
        if not isinstance(data, bytes):
            raise NotCopyable(f"{self._name}.snapshot should return bytes, not {shown(data)}")
        return WorldSnapshot(data)

    async def restore(self, snapshot: WorldSnapshot) -> None:
        """Begins in the state of a snapshot, in place of `init`. Raises EnvironmentFailure."""
        with self._failure_is_final():
            if snapshot.repeated is not None:
                await self._repeat(snapshot.repeated)
                return
            if snapshot.data is None:
                self._env = await self._caller.call(f"copying {self._name}", copied, snapshot.twin)
                return
            if isinstance(self._env, Deferred):
                self._env = await self._make(self._env)
            await self._call("restore", snapshot.data)

    async def _repeat(self, repeated: RepeatedTurns) -> None:
        if digest(await self.init(repeated.prompt)) != repeated.opening:
            raise EnvironmentFailure(f"{self._name} began with other messages than before, {NOT_REPEATED}")
        for number, (action, expected) in enumerate(repeated.turns, 1):
            if _answer(await self.step(action)) != expected:
                raise EnvironmentFailure(f"{self._name} answered turn {number} otherwise than before, {NOT_REPEATED}")

    async def grade(self) -> float | None:
        """Returns the reward of an episode that is ended from outside: 0, unless the environment has a `grade` for it.
        None: unknown. Raises EnvironmentFailure."""
        if self._ended or isinstance(self._env, Deferred) or self._method("grade") is None:
            return 0.0
        with self._failure_is_final():
            graded = reward_of(await self._call("grade"))
        self._ended = "the episode is over"
        return graded

    async def close(self) -> None:
        """Lets the environment clean up. Never raises; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._ended = self._ended or "it is closed"
        if isinstance(self._env, Deferred) or self._method("close") is None:
            return
        try:
            await self._call("close")
        except EnvironmentFailure as error:
            log.warning("an environment could not be closed: %s", error)

    async def metrics(self) -> dict[str, float]:
        """Returns the environment's numeric metrics of the episode. Never raises; call it before `close`."""
        if isinstance(self._env, Deferred) or self._method("get_metrics") is None:
            return {}
        try:
            return numbers_of(await self._call("get_metrics"))
        except Exception as error:  # boundary: the environment's own code; metrics are not worth losing a rollout
            if self._name not in _without_metrics:
                _without_metrics.add(self._name)
                log.warning("no metrics: %s (reported once for %s)", error_text(error), self._name)
            return {}

    async def verdict(self) -> JsonObject:
        """Returns what the environment's verifier saw and said, for people to read: plain JSON of a bounded size, empty
        without a `get_verdict`. Never raises; call it before `close`."""
        if isinstance(self._env, Deferred) or self._method("get_verdict") is None:
            return {}
        try:
            return verdict_of(await self._call("get_verdict"))
        except Exception as error:  # boundary: the environment's own code; a verdict is not worth losing a rollout
            return {"error": f"the verdict cannot be read: {error_text(error)}"}

    def tools(self) -> list[ChatTool]:
        """Returns the tools that the environment offers, in OpenAI's format: its `tools`, or those of its tool groups.
        Empty if it says nothing about them. Never raises."""
        try:
            env: Any = self._env
            own = getattr(env, "tools", None)
            if isinstance(own, list):
                return [one for one in own if _is_tool(one)]
            return [spec for group in getattr(env, "tool_groups", None) or [] for spec in group.specs()]
        except Exception:  # boundary: the environment's own code
            return []

    def _copied(self, prompt: list[Message]) -> list[Message]:
        """Copies the prompt: all rollouts of a task share it, and an environment may change what it gets."""
        try:
            return copy.deepcopy(prompt)
        except Exception as error:  # boundary: the environment's own objects
            raise EnvironmentFailure(
                f"{self._name}: the task's prompt cannot be copied: {error_text(error)}"
            ) from error

    async def _make(self, deferred: Deferred) -> object:
        async def in_this_thread() -> object:
            return deferred.make()

        return await self._caller.call(f"making {self._name}", in_this_thread if deferred.is_async else deferred.make)

    async def _call(self, name: str, *args: object) -> object:
        method = self._method(name)
        if method is None:
            raise EnvironmentFailure(
                f"{self._name} has neither {name} nor {name}_async, so it is not a text environment"
            )
        return await self._caller.call(f"{self._name}.{name}", method, *args)

    def _method(self, name: str) -> Callable[..., Any] | None:
        return getattr(self._env, f"{name}_async", None) or getattr(self._env, name, None)

    @contextmanager
    def _failure_is_final(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # also when cancelled: the environment may be in the middle of something
            self._ended = "it has failed before"
            raise


def _answer(result: StepResult) -> bytes:
    return digest((result.observations, result.reward, result.done))


def _is_tool(found: object) -> TypeGuard[ChatTool]:
    return isinstance(found, dict) and isinstance(found.get("function"), dict)
