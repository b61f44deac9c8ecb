"""Writes changes of the board to disk, one write at a time; changes that happen meanwhile form the next write."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from palestra.server.core.errors import Refusal


class NotSaved(Refusal):
    """Nothing of the call was saved; it may be repeated."""

    def __init__(self, why: BaseException | None = None) -> None:
        because = "" if why is None else f" ({why})"
        super().__init__(
            503, f"the change could not be saved and was not made{because}; send the request again", retry_after_s=1.0
        )


class PendingWrite:
    """A write that is to come, or under way."""

    def __init__(self) -> None:
        self._error: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    def end(self, error: BaseException | None = None) -> None:
        """Ends the write. `error`: why nothing of it was saved."""
        self._error.set_result(error)

    async def over(self) -> None:
        """Waits until the write is over, whether it succeeded or not. Cancelling the wait does not affect the write."""
        await asyncio.wait({self._error})

    async def saved(self) -> None:
        """Waits until the write is saved. Raises `NotSaved`."""
        await self.over()
        if (error := self._error.result()) is not None:
            raise NotSaved(error)


class BoardWriter:
    def __init__(self, write: Callable[[], Awaitable[None]], on_failure: Callable[[BaseException], None]):
        """`write` begins by taking all present changes. `on_failure` is called before any caller is informed: later
        changes are lost with the failed write."""
        self._write, self._on_failure = write, on_failure
        self._next: PendingWrite | None = None
        """The next write; None: there is nothing to write."""
        self._under_way: PendingWrite | None = None
        self._writing: asyncio.Task[None] | None = None

    @property
    def last(self) -> PendingWrite | None:
        """Returns the write after which everything up to now is durable. None: it is durable already."""
        return self._next or self._under_way

    def touch(self) -> None:
        """Notes that something was changed, or may have been."""
        if self._next is None:
            self._next = PendingWrite()
            if self._writing is None:
                self._writing = asyncio.create_task(self._write_all(), name="episodes to disk")

    async def saved(self) -> None:
        """Waits until everything up to now is durable."""
        if (last := self.last) is not None:
            await last.saved()

    async def settle_down(self) -> None:
        while (last := self.last) is not None:
            await last.over()

    async def _write_all(self) -> None:
        try:
            while (write := self._next) is not None:
                self._next, self._under_way = None, write
                try:
                    await self._write()
                except Exception as error:
                    self._fail(error)
                else:
                    self._under_way = None
                    write.end()
        finally:
            self._writing = None

    def _fail(self, error: Exception) -> None:
        """Fails a write and the one after it, which depends on it."""
        lost = [one for one in (self._under_way, self._next) if one is not None]
        self._under_way = self._next = None
        try:
            self._on_failure(error)
        finally:
            for one in lost:
                one.end(error)
