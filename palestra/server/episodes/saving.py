"""Changes on their way to disk: one write at a time; all that happens meanwhile is the next write.

Owns: the order, who waits for which write, giving up what stands on a failed one. Never touches: what changes mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from palestra.server.errors import Refusal


class NotSaved(Refusal):
    """Nothing of it was done; the same call may come again."""

    def __init__(self) -> None:
        super().__init__(503, "this could not be saved, so it was not done; send it again", retry_after_s=1.0)


class Saving:
    def __init__(self, write: Callable[[], Awaitable[None]], on_failure: Callable[[Exception], None]):
        """`write` begins by taking all changes there are. `on_failure` is called before anybody hears of it: what was
        changed since is lost with it."""
        self._write, self._on_failure = write, on_failure
        self._next: asyncio.Future[None] | None = None
        self._under_way: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    def touch(self) -> None:
        """Something was changed, or may have been."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
            self._next.add_done_callback(lambda saved: saved.exception())  # even if nobody waits for it
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="episode changes")

    async def saved(self) -> None:
        """When everything up to now is durable. Whoever is cancelled here changes nothing about that."""
        if (last := self.last) is not None:
            await asyncio.shield(last)

    @property
    def last(self) -> asyncio.Future[None] | None:
        """Of the writes that everything up to now waits for; None: there is none. It fails with `NotSaved`."""
        return self._next or self._under_way

    async def settle_down(self) -> None:
        while self._task is not None and not self._task.done():
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while (saved := self._next) is not None:
            self._next, self._under_way = None, saved
            try:
                await self._write()
            except Exception as error:
                self._fail(error)
                return
            self._under_way = None
            saved.set_result(None)

    def _fail(self, error: Exception) -> None:
        """What came behind it stands on it."""
        lost = [saved for saved in (self._under_way, self._next) if saved is not None]
        self._under_way = self._next = None
        self._on_failure(error)
        for saved in lost:
            saved.set_exception(NotSaved())
