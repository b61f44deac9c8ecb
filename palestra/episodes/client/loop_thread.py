"""An event loop in its own thread, on which other threads of the program run coroutines.

Not anyio's blocking portal: that is a context manager whose end waits for the work that still runs, so that a program
which keeps one for its whole life does not end; and it does not know forks.

Everything that the episode client sends runs on this one loop: a user's code never runs here, and nothing that runs
here may call the synchronous client.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

NAME = "palestra-episodes"
END_S = 5.0
"""How long work that is cancelled may take to clean up."""


class LoopThread:
    """A thread with an event loop; it starts with its first work. As a daemon it does not keep the program from
    ending."""

    def __init__(self, name: str):
        self.name = name
        self.forget()

    def forget(self) -> None:
        """Resets the object after a fork: the child has the memory of the thread, but not the thread."""
        self._lock = threading.Lock()  # protects the fields below
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = _Loop()
                self._thread = threading.Thread(target=_run, args=(self._loop,), name=self.name, daemon=True)
                self._thread.start()
            return self._loop

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the loop and waits for it; for any other thread. Ctrl-C interrupts it at once, and cancels the
        work."""
        if self._thread is threading.current_thread():  # e.g. called by the garbage collector
            work.close()
            raise RuntimeError(f"thread {self.name} cannot wait for itself")
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def join(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the loop; for coroutines of any event loop, including this one. If it is cancelled, so is the
        work."""
        if asyncio.get_running_loop() is self.loop:
            return await work
        return await asyncio.wrap_future(self.start(work))

    async def follow(self, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Like `join`, for an asynchronous generator."""
        try:
            while True:
                yield await self.join(_next(items))
        except StopAsyncIteration:
            return
        finally:
            await self.join(_close(items))

    def each(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Like `wait`, for an asynchronous generator."""
        try:
            while True:
                yield self.wait(_next(items))
        except StopAsyncIteration:
            return
        finally:
            self.start(_close(items))  # not waited for: the garbage collector may close it, in any thread

    def close(self) -> None:
        """Closes the loop; work that still runs is cancelled."""
        wait([self.start(_cancel_others())], 2 * END_S)
        self.loop.call_soon_threadsafe(self.loop.stop)


class _Loop(asyncio.SelectorEventLoop):
    async def getaddrinfo(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().getaddrinfo(*args, **kwargs)
        except RuntimeError:  # the program is ending and cannot start new threads
            return socket.getaddrinfo(*args, **kwargs)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


async def outcome(future: Future[T]) -> T:
    """Waits for work of another thread. If this is cancelled, that work continues."""
    loop = asyncio.get_running_loop()
    is_done = asyncio.Event()

    def tell(_: object) -> None:
        with suppress(RuntimeError):  # it is no longer awaited: that loop is closed
            loop.call_soon_threadsafe(is_done.set)

    future.add_done_callback(tell)
    await is_done.wait()
    return future.result()


async def _next(items: AsyncGenerator[T, None]) -> T:
    return await anext(items)


async def _close(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        if not task.cancelling():
            task.cancel()
    if others:
        await asyncio.wait(others, timeout=END_S)
    await asyncio.get_running_loop().shutdown_asyncgens()


SHARED = LoopThread(NAME)
"""The loop on which all clients of this process talk to their servers, because a player may keep its own loop busy."""
if sys.platform != "win32":
    os.register_at_fork(after_in_child=SHARED.forget)


def shared(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Decorates a coroutine function that may be awaited on any event loop and runs on the shared one."""

    @wraps(method)
    async def join(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        return await SHARED.join(method(self, *args, **kwargs))

    return join
