"""Lets few of the requests that come in thousands begin at a time, so that all others are answered meanwhile."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

AT_ONCE = 16  # each takes less than a millisecond until it waits for something or is answered


class RequestAdmission:
    """ASGI middleware. Requests of some paths begin in the order they arrived, at most so many in one turn of the event
    loop. Without it, all that have arrived begin in the same turn, and a short call behind thousands of samples takes
    seconds."""

    def __init__(self, app: ASGIApp, paths: Collection[str]):
        self.app, self._paths = app, paths
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._free = AT_ONCE
        """How many may still begin in this turn."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in self._paths:
            await self._enter()
        await self.app(scope, receive, send)

    async def _enter(self) -> None:
        loop = asyncio.get_running_loop()
        if self._free == AT_ONCE:
            loop.call_soon(self._next_turn, loop)
        if self._free:
            self._free -= 1
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._free = AT_ONCE
        while self._waiting and self._free:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                self._free -= 1
        if self._free < AT_ONCE:
            loop.call_soon(self._next_turn, loop)
