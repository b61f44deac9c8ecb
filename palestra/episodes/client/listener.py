"""Receiving pushed groups in a thread.

Owns: nothing; `async_listener` does the work. Never touches: the trainer's checkpoint, HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator

from palestra.episodes.client.async_listener import AsyncListener, AsyncPushed
from palestra.episodes.client.facade import Facade, waits
from palestra.episodes.client.loop_thread import SHARED
from palestra.types.episodes import PlayedGroup


class Pushed(Facade[AsyncPushed]):
    """A received group. Store it, then call `ack`; otherwise it is sent again."""

    @property
    def group(self) -> PlayedGroup:
        return self.inner.group

    @property
    def number(self) -> int:
        return self.inner.number

    ack = waits(AsyncPushed.ack)


class Listener(Facade[AsyncListener]):
    """Receives pushed groups; made by `Run.listen`, for one thread."""

    @property
    def address(self) -> str:
        return self.inner.address

    def __enter__(self) -> Listener:
        SHARED.wait(self.inner.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        SHARED.wait(self.inner.__aexit__())

    def __iter__(self) -> Iterator[Pushed]:
        return map(Pushed, SHARED.each(aiter(self.inner)))
