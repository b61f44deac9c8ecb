"""Groups pushed to trainers that listen on ZeroMQ, from the same log that others read.

A run with `push_to` has a listener: its groups are sent there one after another, by their numbers, and each is
committed when the listener acknowledges it. A group that was not acknowledged is sent again, also after the server was
killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

import msgspec
import structlog

from palestra.episodes.board_events import RunProgress
from palestra.server.broker.broker import Broker
from palestra.server.broker.deliveries import Deliveries, DeliveryReading
from palestra.server.broker.push_addresses import check_address
from palestra.server.broker.push_retries import PushTimings, RetriedPushes, RunKey
from palestra.server.core.errors import Refusal
from palestra.types.episodes import PlayedGroup, PushedGroup, RunInfo

log = structlog.get_logger()

GONE = 410
ACK_S, LONGEST_ACK_S = 60.0, 600.0
"""A trainer may write a checkpoint before it answers."""
AT_ONCE = 2048
"""Maximum number of runs; each has one connection."""


class GroupPusher(Protocol):
    """Makes sure that new groups of a run are sent."""

    def look(self, key: RunKey) -> None: ...

    def is_concerned(self, key: RunKey, progress: RunProgress) -> bool:
        """Whether anything of the run is pushed. For most runs nothing is."""
        ...

    def forget(self, key: RunKey | None) -> None:
        """Forgets a deleted run, because another run of its name starts again; None: forgets all runs, which are as
        they were saved."""
        ...


MakeGroupPusher = Callable[[Broker, Deliveries, RetriedPushes], GroupPusher]


class GroupPushes:
    def __init__(self, broker: Broker, pushes: RetriedPushes, lookers: Sequence[GroupPusher]):
        self._broker, self._retried_pushes, self._lookers = broker, pushes, lookers
        self._news: set[RunKey] = set()
        self._is_new = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        broker = self._broker
        broker.on_delivered, broker.on_deleted, broker.on_restored = self._hear, self._forget, self._begin
        self._begin()
        watching = asyncio.create_task(self._watch(), name="pushes")
        try:
            yield
        finally:
            watching.cancel()
            await self._retried_pushes.close()

    def wake(self, key: RunKey) -> None:
        """Called if there is something new in a run, or its listener has changed."""
        self._news.add(key)
        self._is_new.set()

    def _hear(self, key: RunKey, progress: RunProgress) -> None:
        for pusher in self._lookers:
            if pusher.is_concerned(key, progress):
                self.wake(key)
                return

    def _begin(self) -> None:
        """Starts pushing. Also called after the board was read from the disk again: numbers that were not saved may
        belong to other groups now."""
        self._forget(None)
        for key in self._broker.board.undelivered():
            self.wake(key)

    def _forget(self, key: RunKey | None) -> None:
        """Forgets at once: nothing of a run may be taken for something of its successor."""
        self._retried_pushes.stop_all(key)
        for pusher in self._lookers:
            pusher.forget(key)

    async def _watch(self) -> None:
        while True:
            await self._is_new.wait()
            self._is_new.clear()
            news, self._news = self._news, set()
            for key in news:
                self._look(key)

    def _look(self, key: RunKey) -> None:
        for pusher in self._lookers:
            try:
                pusher.look(key)
            except Refusal as error:  # the board is being read again; afterwards all runs are checked again
                log.warning("results are not pushed", run=key[1], why=error.detail)
            except Exception:
                log.exception("results of this run are not pushed", run=key[1])


class RunPushes:
    def __init__(self, broker: Broker, deliveries: Deliveries, pushes: RetriedPushes):
        self._broker, self._deliveries, self._retried_pushes = broker, deliveries, pushes
        self._timings = PushTimings(ACK_S, LONGEST_ACK_S, AT_ONCE)
        self._listeners: dict[RunKey, str] = {}
        """Addresses to which a push is under way, by run."""

    def check(self, address: str) -> None:
        """400 if nothing may be sent to this address."""
        if address:
            check_address("settings.push_to", address, self._broker.config.push_hosts)

    def is_concerned(self, key: RunKey, progress: RunProgress) -> bool:
        return bool(progress.push_to) or key in self._listeners

    def look(self, key: RunKey) -> None:
        info = self._progress(key)
        address = info.push_to
        is_known = self._listeners.get(key) == address
        if not is_known:
            self._retried_pushes.stop((key, 0))
            self._listeners.pop(key, None)
        if not address or info.delivered <= info.committed:
            return
        self._listeners[key] = address
        try:
            self.check(address)
        except Refusal as error:  # the allowed addresses have changed since
            if not is_known:
                log.warning("groups are not pushed", run=key[1], why=error.detail)
            return
        self._retried_pushes.begin((key, 0), partial(self._send_all, key, address))

    def forget(self, key: RunKey | None) -> None:
        for known in [one for one in self._listeners if key in (None, one)]:
            del self._listeners[known]

    async def _send_all(self, key: RunKey, address: str) -> None:
        sender = self._retried_pushes.sender(address, self._timings)
        try:
            while (group := await self._next(key)) is not None:
                if await sender.send(partial(self._payload, key, group), f"ack {group.number}"):
                    await self._commit(key, group.number)
        finally:
            sender.close()

    async def _payload(self, key: RunKey, group: PlayedGroup) -> bytes | None:
        """Returns what is sent; None: another call committed the group meanwhile."""
        if self._info(key).committed >= group.number:
            return None
        return await asyncio.to_thread(msgspec.json.encode, PushedGroup(run=key[1], group=group))

    async def _next(self, key: RunKey) -> PlayedGroup | None:
        while True:
            info = self._info(key)
            if info.delivered <= info.committed:
                return None
            reading = DeliveryReading(*key, info.committed, 1, info.version)
            try:
                groups = await self._deliveries.read(reading, wait_s=0, tokens=True)
            except Refusal as error:
                if error.status != GONE:
                    raise
                continue  # another call committed it meanwhile
            if groups:
                return groups[0]

    def _progress(self, key: RunKey) -> RunProgress:
        return self._broker.look(lambda board: board.progress(*key))

    def _info(self, key: RunKey) -> RunInfo:
        return self._broker.look(lambda board: board.run_info(*key))

    async def _commit(self, key: RunKey, number: int) -> None:
        await self._broker.do(lambda board, now: board.commit(*key, number, now))
        self._broker.observer.changed("groups committed", *key, cursor=number)
