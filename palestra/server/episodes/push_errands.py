"""Things on their way to trainers that listen, each tried until it is taken.

Owns: tasks and lines, back-off, what is said about it in the log. Never touches: what is sent, and what follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import Any

import structlog
import zmq
import zmq.asyncio

from palestra.server.episodes.push_line import Line, NotTaken
from palestra.server.errors import Refusal

log = structlog.get_logger()

FIRST_DELAY_S, LONGEST_DELAY_S = 0.2, 30.0
FIRST_ACK_S, LONGEST_ACK_S = 60.0, 600.0
"""A trainer may write a checkpoint before it answers; one that is slower gets more time when it is sent again."""
RELOADING, RELOAD_S = 503, 1.0
"""What calls of the board get while it is read from the disk again."""
MAX_SOCKETS = 8192  # a line has three


RunKey = tuple[str, str]
"""Owner and run."""
Errand = tuple[RunKey, int]
"""A group's number, or 0 for all of a run."""


class Errands:
    """Each runs once at a time."""

    def __init__(self) -> None:
        self._tasks: dict[Errand, asyncio.Task[None]] = {}
        self._context: zmq.asyncio.Context | None = None

    def begin(self, errand: Errand, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if errand not in self._tasks:
            self._tasks[errand] = asyncio.create_task(self._carry(errand, work), name=f"push {errand}")

    def stop(self, errand: Errand) -> None:
        if (task := self._tasks.pop(errand, None)) is not None:
            task.cancel()

    def stop_all(self, key: RunKey | None = None) -> None:
        """Of one run, or of all."""
        for errand in [one for one in self._tasks if key in (None, one[0])]:
            self.stop(errand)

    def sender(self, address: str, slots: asyncio.Semaphore | None = None) -> Sender:
        if self._context is None:
            self._context = zmq.asyncio.Context()
            self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        return Sender(self._context, address, slots)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def _carry(self, errand: Errand, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
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
                    await asyncio.sleep(LONGEST_DELAY_S)
        finally:
            if self._tasks.get(errand) is asyncio.current_task():
                del self._tasks[errand]


class Sender:
    """To one listener. `slots`: how many of its kind may have a line at once."""

    def __init__(self, context: zmq.asyncio.Context, address: str, slots: asyncio.Semaphore | None):
        self._context, self._address = context, address
        self._slots = slots or nullcontext()
        self._line: Line | None = None
        self._has_failed = False

    async def send(self, payload: bytes, ack: str, is_wanted: Callable[[], bool]) -> bool:
        """Again and again, until the answer is `ack`. False: it is not wanted any more."""
        delay_s, ack_s = FIRST_DELAY_S, FIRST_ACK_S
        while is_wanted():
            try:
                async with self._slots:
                    await self._try(payload, ack, ack_s)
            except NotTaken as error:
                self.close()
                self._tell(str(error))
                await asyncio.sleep(delay_s)
                delay_s, ack_s = min(2 * delay_s, LONGEST_DELAY_S), min(2 * ack_s, LONGEST_ACK_S)
            else:
                if self._has_failed:
                    log.info("results are taken again", address=self._address)
                self._has_failed = False
                return True
        return False

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    async def _try(self, payload: bytes, ack: str, ack_s: float) -> None:
        try:
            if self._line is None:
                self._line = Line(self._context, self._address)
            answer = await self._line.ask(payload, ack_s)
        except zmq.ZMQError as error:
            raise NotTaken(f"{self._address} cannot be reached: {error}") from None
        if answer != ack:
            raise NotTaken(f"who listens at {self._address} answered {answer[:80]!r}, not {ack!r}")

    def _tell(self, why: str) -> None:
        """Once: it may go on for days."""
        if not self._has_failed:
            log.warning("results are not taken; they are kept and sent again", why=why)
        self._has_failed = True
