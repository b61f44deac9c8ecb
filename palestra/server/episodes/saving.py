"""Changes on their way to disk: one write at a time; all that happens meanwhile is the next write.

Owns: the order, who waits for which write, giving up what stands on a failed one. Never touches: what changes mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import structlog

from palestra.server.errors import Refusal

log = structlog.get_logger()


class NotSaved(Refusal):
    """Nothing of it was done; the same call may come again."""

    def __init__(self) -> None:
        super().__init__(503, "this could not be saved, so it was not done; send it again", retry_after_s=1.0)


Report = Callable[[BaseException | None], None]
"""How a write went; None: it is on disk."""


class Saving:
    """Callbacks, not a task: each turn of the loop less is a hundredth of a short call."""

    def __init__(self, write: Callable[[Report], None], on_failure: Callable[[BaseException], None]):
        """`write` begins by taking all changes there are, and reports once. `on_failure` is called before anybody
        hears of it: what was changed since is lost with it."""
        self._write, self._on_failure = write, on_failure
        self._loop: asyncio.AbstractEventLoop | None = None
        """Known since the first change: to ask for it takes a system call."""
        self._next: list[Report] | None = None
        """Who waits for the next write; None: there is nothing to write."""
        self._under_way: list[Report] | None = None
        """None: no write is. Only then `touch` begins one: otherwise the end of that one does."""

    def touch(self) -> None:
        """Something was changed, or may have been."""
        if self._next is None:
            self._next = []
            if self._under_way is None:
                if self._loop is None:
                    self._loop = asyncio.get_running_loop()
                self._loop.call_soon(self._begin)

    def when_saved(self, tell: Report) -> None:
        """Everything up to now; told at once where it is. The error is `NotSaved`."""
        waiters = self._under_way if self._next is None else self._next
        if waiters is None:
            tell(None)
        else:
            waiters.append(tell)

    async def saved(self) -> None:
        """When everything up to now is durable. Whoever is cancelled here changes nothing about that."""
        if (waiter := self.waiter()) is not None:
            await waiter

    def waiter(self) -> asyncio.Future[None] | None:
        """Done when everything up to now is durable; None: it is. It fails with `NotSaved`."""
        if self._next is None and self._under_way is None:
            return None
        waiter = asyncio.get_running_loop().create_future()
        self.when_saved(partial(_settle, waiter))
        return waiter

    async def settle_down(self) -> None:
        while (waiter := self.waiter()) is not None:
            await asyncio.wait({waiter})

    def _begin(self) -> None:
        self._next, self._under_way = None, self._next
        try:
            self._write(self._written)
        except Exception as error:
            self._fail(error)

    def _written(self, error: BaseException | None) -> None:
        if error is not None:
            self._fail(error)
            return
        waiters, self._under_way = self._under_way or [], None
        if self._next is not None:
            self._begin()
        _tell_all(waiters, None)

    def _fail(self, error: BaseException) -> None:
        """What came behind it stands on it."""
        lost = [*(self._under_way or ()), *(self._next or ())]
        self._under_way = self._next = None
        try:
            self._on_failure(error)
        finally:
            _tell_all(lost, NotSaved)


def _tell_all(waiters: list[Report], error: type[BaseException] | None) -> None:
    """Each its own: whoever raises it leaves marks on it."""
    for tell in waiters:
        try:
            tell(None if error is None else error())
        except Exception:  # the others are told all the same
            log.exception("nobody could be told that something was saved, or was not")


def _settle(waiter: asyncio.Future[None], error: BaseException | None) -> None:
    if waiter.done():
        return
    if error is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(error)
        waiter.exception()  # heard of, even if nobody waits for it
