"""Work on many things, so many at a time.

Owns: the tasks, their end. Never touches: what the work is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


async def as_finished(do: Callable[[T], Awaitable[R]], things: Sequence[T], concurrency: int) -> AsyncGenerator[R]:
    """Results in the order they are finished. Ends what is under way when it is closed, or when `do` raises."""
    left = iter(things)
    finished: asyncio.Queue[R | Exception] = asyncio.Queue()

    async def work() -> None:
        for one in left:
            try:
                finished.put_nowait(await do(one))
            except Exception as error:  # told to who waits, instead of nobody
                finished.put_nowait(error)

    workers = [asyncio.create_task(work(), name="as-finished") for _ in range(min(concurrency, len(things)))]
    try:
        for _ in things:
            result = await finished.get()
            if isinstance(result, Exception):
                raise result
            yield result
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
