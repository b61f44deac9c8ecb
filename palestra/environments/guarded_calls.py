"""Calls code that may raise anything, hang, or block."""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from palestra.environments.errors import EnvironmentFailure, EnvironmentTimeout

ERROR_CHARS = 500  # of an error text: some exceptions contain whole pages


class GuardedCaller:
    def __init__(self, pool: Executor, timeout_s: float) -> None:
        self._pool = pool
        self._timeout_s = timeout_s

    async def call(self, where: str, method: Callable[..., Any], *args: object) -> Any:
        """Raises EnvironmentFailure for anything but our own cancellation; `where` names the call in the message."""
        try:
            if inspect.iscoroutinefunction(method):
                return await self._in_task(where, method, *args)
            answer = await self._in_thread(where, method, *args)
            # A wrapped coroutine function looks like any other, until it is called.
            return await self._in_task(where, lambda: answer) if inspect.isawaitable(answer) else answer
        except EnvironmentFailure:
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise EnvironmentFailure(f"{where} was cancelled from within") from error
        except (Exception, SystemExit) as error:
            raise EnvironmentFailure(f"{where} raised {error_text(error)}") from error

    async def _in_task(self, where: str, method: Callable[..., Any], *args: object) -> object:
        """Calls in the caller's own task: what an environment opens in one call it may have to close in the same
        task."""
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await method(*args)
        except TimeoutError as error:
            if limit.expired():
                raise self._too_late(where) from error
            raise

    async def _in_thread(self, where: str, method: Callable[..., Any], *args: object) -> object:
        call = _ThreadCall(method, args)
        waiter = asyncio.wrap_future(self._pool.submit(call.run))
        try:
            while not waiter.done():
                left_s = call.left_s(self._timeout_s)
                if left_s <= 0:
                    raise self._too_late(where)
                await asyncio.wait({waiter}, timeout=left_s)
        finally:
            if not waiter.done():
                waiter.cancel()  # this also abandons the thread
        if call.error is not None:
            raise EnvironmentFailure(f"{where} raised {error_text(call.error)}") from call.error
        return call.result

    def _too_late(self, where: str) -> EnvironmentTimeout:
        return EnvironmentTimeout(f"{where} took longer than {self._timeout_s:g} s (rollout.env_timeout_s)")


class _ThreadCall:
    """One call in a thread. Its time counts from when a thread started it, not while it is queued."""

    def __init__(self, method: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._method, self._args = method, args
        self._started_s: float | None = None
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        self._started_s = time.monotonic()
        try:
            self.result = self._method(*self._args)
        # stored here, because a future cannot carry StopIteration, and SystemExit ends loops
        except BaseException as error:
            self.error = error

    def left_s(self, timeout_s: float) -> float:
        return timeout_s if self._started_s is None else self._started_s + timeout_s - time.monotonic()


def error_text(error: BaseException) -> str:
    """Returns the error's text on one line, of limited length, even if the exception's `__str__` fails."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # boundary: foreign `__str__`
        text = "(its repr failed)"
    return f"{type(error).__name__}: {text}"[:ERROR_CHARS] if text else type(error).__name__


def place_of(error: BaseException, caller: str) -> str:
    """Returns ` (file:line)` of where it was raised; empty if that is in `caller`, the file that made the call."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith("<frozen")]
    if not frames or frames[-1].filename == caller:
        return ""
    return f" ({frames[-1].filename}:{frames[-1].lineno})"
