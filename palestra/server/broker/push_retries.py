"""Pushes to trainers that listen, each retried until it is acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog
import zmq
import zmq.asyncio

from palestra.server.broker.push_socket import PushNotAcknowledged, PushSocket
from palestra.server.core.errors import Refusal
from palestra.util.backoff import Backoff

log = structlog.get_logger()

RETRIES = Backoff(0.2, 30.0)
PROMPT_S = 2.0
"""A listener that takes longer to answer gives its slot to others that were not tried yet."""
RELOADING, RELOAD_S = 503, 1.0
"""Status of calls to the board while it is read from the disk again, and the pause after it."""
MAX_SOCKETS = 8192  # a connection needs three


RunKey = tuple[str, str]
"""Owner and run."""
Push = tuple[RunKey, int]
"""A group's number, or 0 for all of a run."""


class PushTimings:
    """How long senders of one kind wait for an answer, and how many of them send at once."""

    def __init__(self, ack_s: float, longest_ack_s: float, at_once: int):
        """`longest_ack_s`: a slow listener gets more time when a group is sent again."""
        self.ack_s, self.longest_ack_s = ack_s, longest_ack_s
        # Two limits, so that new groups do not wait behind listeners that are gone, or silent.
        self.first, self.again = asyncio.Semaphore(at_once), asyncio.Semaphore(at_once)


class RetriedPushes:
    """Runs pushes, each of them once at a time."""

    def __init__(self) -> None:
        self._tasks: dict[Push, asyncio.Task[None]] = {}
        self._context: zmq.asyncio.Context | None = None

    def begin(self, push: Push, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if push not in self._tasks:
            self._tasks[push] = asyncio.create_task(self._carry(push, work), name=f"push {push}")

    def stop(self, push: Push) -> None:
        if (task := self._tasks.pop(push, None)) is not None:
            task.cancel()

    def stop_all(self, key: RunKey | None = None) -> None:
        """Stops the pushes of one run, or of all."""
        for push in [one for one in self._tasks if key in (None, one[0])]:
            self.stop(push)

    def sender(self, address: str, timings: PushTimings) -> PushSender:
        if self._context is None:
            self._context = zmq.asyncio.Context()
            self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        return PushSender(self._context, address, timings)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def _carry(self, push: Push, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            while True:
                try:
                    await work()
                    return
                except Refusal as error:
                    if error.status != RELOADING:
                        log.warning("results are not pushed", why=error.detail)
                        return
                    await asyncio.sleep(RELOAD_S)
                except Exception:
                    log.exception("results could not be pushed; trying again")
                    await asyncio.sleep(RETRIES.longest_s)
        finally:
            if self._tasks.get(push) is asyncio.current_task():
                del self._tasks[push]


class PushSender:
    """Sends to one listener."""

    def __init__(self, context: zmq.asyncio.Context, address: str, timings: PushTimings):
        self._context, self._address, self._timings = context, address, timings
        self._line: PushSocket | None = None
        self._has_failed = False

    async def send(self, make: Callable[[], Awaitable[bytes | None]], ack: str) -> bool:
        """Sends again and again, until the answer is `ack`. `make` returns what is sent, and is called each time,
        because thousands of pushes may wait; None: it is not needed any more, and False is returned."""
        pauses, ack_s, is_first = RETRIES.pauses(), self._timings.ack_s, True
        while True:
            try:
                async with self._timings.first if is_first else self._timings.again:
                    if (payload := await make()) is None:
                        return False
                    answer = await self._ask(payload, PROMPT_S if is_first else ack_s)
                if answer is None and is_first:
                    answer = await self._wait_on(ack_s)
                self._check(answer, ack, ack_s)
            except (PushNotAcknowledged, zmq.ZMQError) as error:
                self.close()
                self._tell(str(error))
                await asyncio.sleep(next(pauses))
                ack_s, is_first = min(2 * ack_s, self._timings.longest_ack_s), False
            else:
                if self._has_failed:
                    log.info("the trainer accepts results again", address=self._address)
                self._has_failed = False
                return True

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    async def _ask(self, payload: bytes, wait_s: float) -> str | None:
        if self._line is None:
            self._line = PushSocket(self._context, self._address)
        await self._line.send(payload)
        return await self._line.answer(wait_s)

    async def _wait_on(self, ack_s: float) -> str | None:
        """Waits for a listener that does not answer at once, in a slot for repeated pushes, if one is free."""
        assert self._line is not None
        if self._timings.again.locked():
            raise PushNotAcknowledged(
                f"the trainer at {self._address} did not answer for {PROMPT_S:g} s while others wait"
            )
        async with self._timings.again:
            return await self._line.answer(ack_s)

    def _check(self, answer: str | None, ack: str, ack_s: float) -> None:
        if answer is None:
            raise PushNotAcknowledged(f"the trainer at {self._address} did not answer for {ack_s:g} s")
        if answer != ack:
            raise PushNotAcknowledged(f"the trainer at {self._address} answered {answer[:80]!r}, not {ack!r}")

    def _tell(self, why: str) -> None:
        """Logs a problem once: it may continue for days."""
        if not self._has_failed:
            log.warning(
                "the trainer does not accept results; they are kept and sent again", address=self._address, why=why
            )
        self._has_failed = True
