"""Calls that are repeated until they are answered: every one of this API may be sent twice.

Owns: JSON, the key, back-off, what a refusal says. Never touches: sockets, leases.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec

from palestra.episodes.client.api import Call
from palestra.episodes.client.errors import ClientClosed, EpisodeApiError, EpisodeClientError, NotThere, ServerSilent
from palestra.episodes.client.transport import BROKEN, HttpAnswer, Request, Transport, lines, whole

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_S = 300.0  # a server that is restarted, model and all, is back by then
REACH_S = 3.0  # a wrong address is told within 5 s, the start of a program included
FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 3.0
LONGEST_RETRY_AFTER_S = 60.0
COME_BACK = (429, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why an answer is still missing."""

    reason: str
    retry_after_s: float = 0.0


class Calls:
    """One server's. `do` is for threads, `do_async` for event loops: there only the exchange itself is in a thread, so
    that whoever waits can be cancelled at any time."""

    def __init__(self, transport: Transport, key: str | None, retry_s: float = RETRY_S):
        self.transport, self.retry_s = transport, retry_s
        self._headers = {"Accept": "application/json", "User-Agent": "palestra-episodes"}
        if key:
            self._headers["X-API-Key"] = key
        self.closed = threading.Event()
        self._away = threading.Event()
        """Some call waits for the server. It is told once, not by each of many threads."""

    def do(self, call: Call[T], *, retry_s: float | None = None) -> T:
        """`retry_s`: for calls that are worth less patience than others; 0: none."""
        patience, request = self._begin(call, retry_s)
        while True:
            self._check_open()
            got = self._try(request)
            if isinstance(got, HttpAnswer):
                return self._read(got, call)
            self.closed.wait(patience.next_delay(got))

    def reach(self) -> None:
        """Before the first call of something that would otherwise wait for very long: is anybody there at all?"""
        patience = Patience(self.transport.url, self._away, min(REACH_S, self.retry_s))
        while True:
            self._check_open()
            try:
                with self._trusted():
                    return self.transport.connect()
            except ServerSilent:
                raise
            except BROKEN as error:
                self.closed.wait(patience.next_delay(Waiting(str(error) or type(error).__name__)))

    def lines(self, call: Call[T]) -> Iterator[T]:
        """Of an answer that comes line by line. It is not repeated: what was told already may be done with."""
        self._check_open()
        _, request = self._begin(call, 0)
        try:
            with self.transport.stream(request, self._headers) as answer:
                if answer.status >= 300:
                    self._read(whole(answer), call)
                for line in lines(answer):
                    yield self._record(line, answer.status, call)
        except BROKEN as error:
            raise ServerSilent(f"{self.transport.url} broke off: {error or type(error).__name__}") from error

    async def do_async(
        self,
        call: Call[T],
        threads: Executor,
        *,
        retry_s: float | None = None,
        orphan: Callable[[T], None] | None = None,
    ) -> T:
        """`orphan` gets, in a thread, an answer that comes after the caller was cancelled."""
        patience, request = self._begin(call, retry_s)
        while True:
            self._check_open()
            work = threads.submit(self._try, request)
            try:
                got = await asyncio.wrap_future(work)
            except asyncio.CancelledError:
                if orphan is not None:
                    self._hand_over(work, call, orphan)
                raise
            if isinstance(got, HttpAnswer):
                return self._read(got, call)
            await asyncio.sleep(patience.next_delay(got))

    def _hand_over(self, work: Future[HttpAnswer | Waiting], call: Call[T], orphan: Callable[[T], None]) -> None:
        loop_thread = threading.get_ident()

        def take() -> None:
            got = work.result()
            if isinstance(got, HttpAnswer) and got.status < 300:
                with suppress(EpisodeClientError):
                    orphan(self._read(got, call))

        def done(_: object) -> None:
            if work.cancelled():
                return
            if threading.get_ident() == loop_thread:  # it was done already, and this loop has other work
                threading.Thread(target=take, name="episode-orphan").start()
            else:
                take()

        work.add_done_callback(done)

    def _begin(self, call: Call[Any], retry_s: float | None) -> tuple[Patience, Request]:
        patience = Patience(
            self.transport.url, self._away, self.retry_s if retry_s is None else min(retry_s, self.retry_s)
        )
        body = None if call.body is None else msgspec.json.encode(call.body)
        target = f"{call.path}?{urlencode(call.query)}" if call.query else call.path
        return patience, Request(call.method, target, body, call.timeout_s)

    def _try(self, request: Request) -> HttpAnswer | Waiting:
        headers = self._headers if request.body is None else {**self._headers, "Content-Type": "application/json"}
        try:
            with self._trusted():
                got = self.transport.exchange(request, headers)
        except ServerSilent:
            raise
        except BROKEN as error:
            return Waiting(str(error) or type(error).__name__)
        if got.status not in COME_BACK:
            self._away.clear()
            return got
        return Waiting(f"{got.status} {_words(got)}", _retry_after_s(got))

    @contextmanager
    def _trusted(self) -> Iterator[None]:
        """Around what may open a connection: to try again does not change a certificate."""
        try:
            yield
        except ssl.SSLCertVerificationError as error:
            hint = "tls=ssl.create_default_context(cafile=…) trusts another certificate"
            raise ServerSilent(f"{self.transport.url} is not trusted: {error.verify_message}; {hint}") from error

    def _read(self, got: HttpAnswer, call: Call[T]) -> T:
        what = f"{call.method} {call.path}"
        if got.status >= 300:
            raise self._refusal(got, what)
        return self._record(got.body, got.status, call)

    def _record(self, text: bytes, status: int, call: Call[T]) -> T:
        try:
            return msgspec.json.decode(text, type=call.answer)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            hint = f"not what this client understands ({error}); is {self.transport.url} a Palestra server?"
            raise EpisodeApiError(status, hint, f"{call.method} {call.path}") from error

    def _refusal(self, got: HttpAnswer, what: str) -> EpisodeApiError:
        url, words = self.transport.url, _words(got)
        if got.status < 400:
            words = f"{url} points to {got.headers.get('location', 'elsewhere')}: use that URL"
        elif got.status in (404, 405) and words in ("Not Found", "Method Not Allowed", got.reason):
            words = f"{url} has no such route; is it a Palestra server, and not older than this client?"
        elif got.status == 404:
            return NotThere(got.status, words, what)
        return EpisodeApiError(got.status, words, what)

    def _check_open(self) -> None:
        if self.closed.is_set():
            raise ClientClosed("this client is closed")


class Patience:
    """With one call: how long to wait before the next try, and when to stop."""

    def __init__(self, url: str, away: threading.Event, retry_s: float):
        self._url, self._away, self._retry_s = url, away, retry_s
        self._begin, self._tries = time.monotonic(), 0

    def next_delay(self, waiting: Waiting) -> float:
        spent_s = time.monotonic() - self._begin
        delay_s = min(FIRST_DELAY_S * 2 ** min(self._tries, 10), LONGEST_DELAY_S)
        delay_s = max(waiting.retry_after_s, delay_s) * random.uniform(1.0, 1.5)  # or all come back in one moment
        if spent_s + delay_s > self._retry_s:
            tried = f", tried for {spent_s:.0f} s" if self._tries else ""
            raise ServerSilent(f"{self._url} does not answer{tried}: {waiting.reason}")
        if not self._away.is_set():
            self._away.set()
            log.warning("%s: %s; trying again, for up to %.0f s", self._url, waiting.reason, self._retry_s)
        self._tries += 1
        return delay_s


def _words(got: HttpAnswer) -> str:
    """The server's own, or a proxy's."""
    try:
        told = msgspec.json.decode(got.body)
    except msgspec.DecodeError:
        told = None
    if isinstance(told, dict):
        error = told.get("error")
        said = told.get("detail") or (error.get("message") if isinstance(error, dict) else error)
        if said:
            return said if isinstance(said, str) else msgspec.json.encode(said).decode()
    return got.reason or "no reason given"


def _retry_after_s(got: HttpAnswer) -> float:
    told = got.headers.get("retry-after", "")
    try:
        seconds = float(told)
    except ValueError:
        seconds = _until(told)
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER_S) if seconds == seconds else 0.0


def _until(date: str) -> float:
    try:
        return parsedate_to_datetime(date).timestamp() - time.time()
    except ValueError:
        return 0.0
