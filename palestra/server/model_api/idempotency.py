"""Idempotent calls: a call that a client repeats is not sampled twice.

An SDK that gave up waiting closes its connection and sends the same call again a moment later. The abandoned call is
kept running for that moment, and its answer goes to the repeated call; an answer that was not read to its end is kept
longer. Equal calls that were not abandoned are independent: each is sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from palestra.server.core.owners.callers import Caller
from palestra.server.http.connection import while_connected
from palestra.server.model_api.delivery_acks import DeliveryAcks

RETRY_COUNT = "x-stainless-retry-count"
"""OpenAI's and Anthropic's SDKs send with each call how often they tried before."""
IDEMPOTENCY_KEY = "idempotency-key"
LINGER_S = 3.0  # the SDKs retry after half a second, then one, then two
NOTICE_S = 0.1  # a connection's end may be read after the request that a retry sends on the next one
KEEP_S = 60.0  # for a finished answer; the retry may have to wait for its turn


@dataclass(slots=True, eq=False)
class _Call:
    name: bytes
    response_id: str
    task: asyncio.Task[bytes]
    readers: int = 0
    timer: asyncio.TimerHandle | None = None
    """Runs also while no client reads."""


@dataclass(frozen=True, slots=True)
class _Header:
    """What a request's headers say about retries."""

    count: int | None
    key: str | None

    @classmethod
    def of(cls, request: Request) -> _Header:
        count = request.headers.get(RETRY_COUNT, "")[:4]
        return cls(int(count) if count.isascii() and count.isdigit() else None, request.headers.get(IDEMPOTENCY_KEY))

    @property
    def may_retry(self) -> bool:
        return self.count is not None or self.key is not None


@dataclass(slots=True, eq=False)
class IdempotentCalls:
    receipts: DeliveryAcks
    _calls: dict[bytes, list[_Call]] = field(default_factory=dict)
    """Calls that run, or whose answers were not read to the end, by caller and content."""

    async def answer(
        self,
        request: Request,
        caller: Caller,
        body: bytes,
        response_id: str,
        work: Callable[[], Coroutine[Any, Any, bytes]],
    ) -> Response:
        """Answers a call. `work` makes the body of the answer."""
        header = _Header.of(request)
        name = _name(request, caller, header, body)
        call = await self._find(header, name) or self._start(name, response_id, work)
        call.readers += 1
        if call.timer is not None:
            call.timer.cancel()
        try:
            answered = await while_connected(request, _result(call.task))
        except BaseException as error:
            self._left(call, header if isinstance(error, ClientDisconnect | asyncio.CancelledError) else None)
            raise
        return _Answer(
            answered,
            lambda: self.receipts.acknowledge(call.response_id),
            lambda is_read: self._left(call, None if is_read else header),
        )

    async def _find(self, header: _Header, name: bytes) -> _Call | None:
        """Finds a call by its idempotency key; without a key, one that was abandoned."""
        if header.key is not None:
            return next(iter(self._calls.get(name, ())), None)
        if not header.count:
            return None
        if (abandoned := self._abandoned(name)) is None:
            await asyncio.sleep(NOTICE_S)
            abandoned = self._abandoned(name)
        return abandoned

    def _abandoned(self, name: bytes) -> _Call | None:
        return next((call for call in self._calls.get(name, ()) if not call.readers), None)

    def _start(self, name: bytes, response_id: str, work: Callable[[], Coroutine[Any, Any, bytes]]) -> _Call:
        call = _Call(name, response_id, asyncio.create_task(work(), name="model call"))
        call.task.add_done_callback(_notice)
        self._calls.setdefault(name, []).append(call)
        return call

    def _left(self, call: _Call, header: _Header | None) -> None:
        """Called when a client has left. `header`: of a client that may come back; None: there is nothing to come back
        for."""
        call.readers -= 1
        if call.readers:
            return
        if header is None or not header.may_retry:
            self._forget(call)
            return
        wait_s = KEEP_S if call.task.done() else LINGER_S
        call.timer = asyncio.get_running_loop().call_later(wait_s, self._forget, call)

    def _forget(self, call: _Call) -> None:
        call.task.cancel()
        self.receipts.forget(call.response_id)
        same = self._calls.get(call.name, [])
        if call in same:
            same.remove(call)
        if not same:
            self._calls.pop(call.name, None)


_NOTHING = {"type": "http.response.body", "body": b""}


class _Answer(Response):
    """A response that notes whether its client read it to the end."""

    def __init__(self, body: bytes, handed_over: Callable[[], None], after: Callable[[bool], None]):
        super().__init__(body, media_type="application/json")
        self._handed_over, self._after = handed_over, after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_read = False
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self.body, "more_body": True})
            await send(_NOTHING | {"more_body": True})  # waits until there is room again: the client reads, or is gone
            self._handed_over()  # also if it is gone by now: some clients hang up as soon as they have read
            is_read = not await Request(scope, receive).is_disconnected()
            await send(_NOTHING)
        finally:
            self._after(is_read)


def _notice(task: asyncio.Task[bytes]) -> None:
    """Retrieves the error of a task whose client may be gone, so that asyncio does not report it."""
    if not task.cancelled():
        task.exception()


async def _result(task: asyncio.Task[bytes]) -> bytes:
    return await asyncio.shield(task)


def _name(request: Request, caller: Caller, header: _Header, body: bytes) -> bytes:
    digest = blake2b(digest_size=16)
    for part in (caller.owner, caller.who, request.url.path, header.key or ""):
        digest.update(part.encode() + b"\0")
    digest.update(body)
    return digest.digest()
