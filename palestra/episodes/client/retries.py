"""Calls that are repeated until they are answered; every call of this API may be sent twice."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import msgspec

from palestra.episodes.client import api
from palestra.episodes.client.api import ApiCall
from palestra.episodes.client.errors import ClientClosed, EpisodeApiError, NotThere, ServerSilent
from palestra.episodes.client.http_exchange import ExchangeBroken, HttpExchange, lines
from palestra.episodes.client.loop_thread import SHARED, shared
from palestra.util.backoff import Backoff, retry_after_s

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_S = 300.0  # by then a server that is restarted has loaded its model and is back
REACH_S = 3.0  # a wrong address is reported within 5 s, including the start of the program
RETRIES = Backoff(0.1, 3.0)
COME_BACK = (429, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class WaitReason:
    """Why an answer is still missing."""

    reason: str
    retry_after_s: float = 0.0


class RetryingCalls:
    """Calls to one server, for coroutines of any event loop. `key`: API key (None: TINKER_API_KEY)."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        retry_s: float = RETRY_S,
        *,
        tls: ssl.SSLContext | None = None,
        proxy: str | None = None,
    ):
        self.retry_s = retry_s
        self._exchange = HttpExchange(url, key or os.environ.get("TINKER_API_KEY"), tls=tls, proxy=proxy)
        self.is_away = False
        """Whether some call waits for the server. This is logged once, not by each of many calls."""
        self._is_closed = False
        self._running = 0
        self._pausing: set[asyncio.Future[None]] = set()

    @property
    def url(self) -> str:
        return self._exchange.url

    @shared
    async def do(self, call: ApiCall[T], *, retry_s: float | None = None) -> T:
        """Sends a call until it is answered. `retry_s`: shorter retry time for this call; 0: no retries."""
        patience = RetryBudget(self, self.retry_s if retry_s is None else min(retry_s, self.retry_s))
        while True:
            async with self._call_under_way():
                got = await self._try(call)
            if isinstance(got, httpx.Response):
                return self._read(got, call)
            await self.pause(patience.next_delay(got))

    def lines(self, call: ApiCall[T]) -> AsyncGenerator[T, None]:
        """The lines of an answer that comes line by line. The call is not repeated: lines may have been used
        already."""
        return SHARED.follow(self._lines(call))

    async def _lines(self, call: ApiCall[T]) -> AsyncGenerator[T, None]:
        async with self._call_under_way():
            try:
                async with self._exchange.stream(call) as answer:
                    if answer.status_code >= 300:
                        await answer.aread()
                        raise self._refusal(answer, call)
                    async with aclosing(lines(answer)) as stream:
                        async for line in stream:
                            yield self._record(line, answer.status_code, call)
            except ExchangeBroken as error:
                raise ServerSilent(f"{self.url} closed the connection: {error.reason}") from error

    @shared
    async def reach(self) -> None:
        """Checks that a server is there, before the first call of something that would otherwise wait for very long."""
        patience = RetryBudget(self, min(REACH_S, self.retry_s))
        while True:
            async with self._call_under_way():
                try:
                    await self._exchange.send(api.health(REACH_S))
                    return
                except ExchangeBroken as error:
                    if error.is_reached:
                        return
                    waiting = WaitReason(error.reason)
            await self.pause(patience.next_delay(waiting))

    @shared
    async def pause(self, seconds: float) -> None:
        """Sleeps; raises if the client is closed, before or meanwhile."""
        woken = asyncio.get_running_loop().create_future()
        self._pausing.add(woken)
        try:
            await asyncio.wait([woken], timeout=0.0 if self._is_closed else seconds)
        finally:
            self._pausing.discard(woken)

    @shared
    async def close(self) -> None:
        """Closes the client. Calls under way are finished; those that wait for the server are not."""
        self._is_closed = True
        for woken in self._pausing:
            woken.cancel()
        if not self._running:
            await self._exchange.close()

    async def _try(self, call: ApiCall[Any]) -> httpx.Response | WaitReason:
        try:
            got = await self._exchange.send(call)
        except ExchangeBroken as error:
            return WaitReason(error.reason)
        if got.status_code in COME_BACK:
            return WaitReason(f"{got.status_code} {_response_text(got)}", retry_after_s(got.headers.get("retry-after")))
        self.is_away = False
        return got

    @asynccontextmanager
    async def _call_under_way(self) -> AsyncIterator[None]:
        if self._is_closed:
            raise ClientClosed("this client is closed")
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if self._is_closed and not self._running:
                await self._exchange.close()

    def _read(self, got: httpx.Response, call: ApiCall[T]) -> T:
        if got.status_code >= 300:
            raise self._refusal(got, call)
        return self._record(got.content, got.status_code, call)

    def _record(self, text: bytes, status: int, call: ApiCall[T]) -> T:
        try:
            return msgspec.json.decode(text, type=call.answer)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            hint = f"the answer cannot be read ({error}); is {self.url} a Palestra server?"
            raise EpisodeApiError(status, hint, f"{call.method} {call.path}") from error

    def _refusal(self, got: httpx.Response, call: ApiCall[Any]) -> EpisodeApiError:
        status, message, what = got.status_code, _response_text(got), f"{call.method} {call.path}"
        if status < 400:
            message = f"{self.url} redirects to {got.headers.get('location', 'elsewhere')}; use that URL"
        elif status in (404, 405) and message in ("Not Found", "Method Not Allowed", got.reason_phrase):
            message = f"{self.url} has no such route; is it a Palestra server, and not older than this client?"
        elif status == 404:
            return NotThere(status, message, what)
        return EpisodeApiError(status, message, what)


class RetryBudget:
    """Decides for one call how long to wait before the next try, and when to stop."""

    def __init__(self, calls: RetryingCalls, retry_s: float):
        self._calls, self._retry_s = calls, retry_s
        self._begin, self._tries = time.monotonic(), 0

    def next_delay(self, waiting: WaitReason) -> float:
        spent_s = time.monotonic() - self._begin
        # random, otherwise all clients come back at the same moment
        delay_s = max(waiting.retry_after_s, RETRIES.after(self._tries + 1)) * random.uniform(1.0, 1.5)
        if spent_s + delay_s > self._retry_s:
            tried = f", tried for {spent_s:.0f} s" if self._tries else ""
            raise ServerSilent(f"{self._calls.url} does not answer{tried}: {waiting.reason}")
        if not self._calls.is_away:
            self._calls.is_away = True
            log.warning("%s: %s; trying again, for up to %.0f s", self._calls.url, waiting.reason, self._retry_s)
        self._tries += 1
        return delay_s


def _response_text(got: httpx.Response) -> str:
    """Returns the error text of the server, or of a proxy."""
    try:
        body = msgspec.json.decode(got.content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = None
    if isinstance(body, dict):
        error = body.get("error")
        detail = body.get("detail") or (error.get("message") if isinstance(error, dict) else error)
        if detail:
            return detail if isinstance(detail, str) else msgspec.json.encode(detail).decode()
    return got.reason_phrase or "no reason given"
