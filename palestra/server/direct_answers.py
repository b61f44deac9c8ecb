"""Answers given by the HTTP protocol itself, without ASGI: for short calls that come thousands of times a second.

Owns: which requests are plain enough, the order of a connection's answers, writing them. Never touches: what is asked.

ASGI takes most of such a call's time: a task, a scope, messages, two coroutines for each layer. What is not plain here
(a body in chunks, or packed, or long; a proxy's headers; a client that does not read) goes that way all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from msgspec import Struct, field
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from palestra.server.logs import RequestLog, current_request
from palestra.server.whole_answers import WholeAnswers

LONG_BYTES = 1 << 16  # to look at every name in it takes some 10 ms: beside the loop, then
MAX_DIGITS = len(str(LONG_BYTES))
UNUSUAL = frozenset(
    (
        *(b"content-encoding", b"transfer-encoding", b"expect", b"upgrade"),
        *(b"proxy-connection", b"x-forwarded-for", b"x-forwarded-proto"),
    )
)
END_OF_HEAD = b"\r\n\r\n"
MAX_HEADS, MAX_HEAD_BYTES = 8, 2048  # of a connection: a player has one for each call, and its lengths
ANSWER = b"%s%scontent-length: %d\r\ncontent-type: application/json\r\n\r\n%s"


class Address(Struct, frozen=True):
    """That a call came in at."""

    scheme: str
    server: tuple[str, int | None] | None
    host: bytes | None
    """As the client named it."""
    root_path: str = ""


class DirectCall(Protocol):
    @property
    def route(self) -> str: ...

    def begin(self, exchange: Exchange) -> bool:
        """Sees to it that `exchange.reply` is called once, now or later. False: by ASGI instead, nothing is done."""
        ...


class DirectCalls(Protocol):
    def find(self, url: bytes) -> DirectCall | None:
        """Of a POST."""
        ...


class Exchange(Struct, eq=False):
    """A request and its answer. To uvicorn it is one of its own, and the next request of the connection waits."""

    protocol: DirectAnswers
    call: DirectCall
    headers: Mapping[bytes, bytes]
    """The first of each name."""
    began_at: float
    """By `perf_counter`."""
    body: bytes = b""
    marks: dict[str, Any] = field(default_factory=dict)
    """Of its lines in the log."""
    on_gone: Callable[[], object] | None = None
    """When nobody waits for the answer any more."""
    response_complete: bool = False
    disconnected: bool = False
    keep_alive: bool = True

    @property
    def message_event(self) -> Exchange:
        return self

    def set(self) -> None:
        """uvicorn's word that something happened."""
        if self.disconnected and self.on_gone is not None:
            self.on_gone()

    def address(self) -> Address:
        protocol = self.protocol
        return Address(protocol.scheme or "http", protocol.server, self.headers.get(b"host"))

    def reply(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """As `current_request`."""
        self.response_complete = True
        self.protocol.answer(self, status, body, headers)


class Head(Struct, frozen=True):
    """Of a plain request."""

    call: DirectCall
    headers: Mapping[bytes, bytes]
    body_bytes: int


class DirectAnswers(WholeAnswers):
    def __init__(
        self, *args: Any, calls: DirectCalls, log: RequestLog, max_bytes: int = LONG_BYTES, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._calls, self._log, self._max_bytes = calls, log, min(max_bytes, LONG_BYTES)
        self._told: tuple[Any, bytes] = (None, b"")
        """uvicorn's own headers, as they are written. They change once a second."""
        self._idle_since: float | None = None
        """None: it is being used."""
        self._heads: dict[bytes, Head] = {}
        """Those that came before, byte for byte. Clients send few, thousands of times each."""
        self._is_in_message = False
        """The parser is."""

    def data_received(self, data: bytes) -> None:
        """A whole request with a head that was parsed before is not parsed again: it means the same."""
        if self._is_in_message:
            super().data_received(data)
            return
        head, end, body = data.partition(END_OF_HEAD)
        known = self._heads.get(head) if end else None
        if known is not None and len(body) == known.body_bytes and self._is_free():
            self._idle_since = None
            exchange = Exchange(self, known.call, known.headers, time.perf_counter(), body)
            before, self.cycle = self.cycle, exchange  # type: ignore[assignment]
            if self._begin(exchange):
                return
            self.cycle = before
        before = self.cycle
        super().data_received(data)
        if not self._is_in_message and self.cycle is not before:
            self._learn(head, body)

    def _learn(self, head: bytes, body: bytes) -> None:
        """What came is whole, and begins with a request of this head."""
        exchange: Any = self.cycle
        if isinstance(exchange, Exchange) and exchange.body == body and len(head) <= MAX_HEAD_BYTES:
            if len(self._heads) >= MAX_HEADS:
                self._heads.clear()
            self._heads[head] = Head(exchange.call, exchange.headers, len(body))

    def on_message_begin(self) -> None:
        """The rest of it waits until it is known to be needed."""
        self._is_in_message = True
        self.url, self.headers = b"", []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._is_free():
            headers = dict(reversed(self.headers))
            if (call := self._calls.find(self.url)) is not None and self._is_plain(headers):
                self.cycle = Exchange(self, call, headers, time.perf_counter())  # type: ignore[assignment]
                return
        self._begin_asgi()

    def on_body(self, body: bytes) -> None:
        if isinstance(self.cycle, Exchange):
            self.cycle.body += body
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_message = False
        exchange: Any = self.cycle
        if not isinstance(exchange, Exchange):
            super().on_message_complete()
        elif not self._begin(exchange):
            self.cycle = None  # type: ignore[assignment]
            self._begin_asgi()
            self.cycle.keep_alive &= exchange.keep_alive  # the server may be stopping since
            super().on_body(exchange.body)
            super().on_message_complete()

    def _begin(self, exchange: Exchange) -> bool:
        token = current_request.set(exchange.marks)
        try:
            return exchange.call.begin(exchange)
        finally:
            current_request.reset(token)

    def answer(self, exchange: Exchange, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Nobody is told where nobody listens any more; the connection goes on either way, or ends."""
        if not self.joining.is_closing():
            if self._told[0] is not self.server_state.default_headers:
                self._tell_own_headers()
            lines = self._told[1]
            for header in headers:
                lines += b"%s: %s\r\n" % header
            if not exchange.keep_alive:
                lines += b"connection: close\r\n"
            self.joining.write_whole(ANSWER % (STATUS_LINE[status], lines, len(body), body))
            if not exchange.keep_alive:
                self.transport.close()
        self.on_response_complete()
        self._log.over(exchange.call.route, "POST", status, time.perf_counter() - exchange.began_at)

    def on_response_complete(self) -> None:
        """As uvicorn does it, but for one timer where it has another for each answer."""
        self.server_state.total_requests += 1
        if self.joining.is_closing():
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._look_in(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        super().connection_lost(exc)

    def _unset_keepalive_if_required(self) -> None:
        self._idle_since = None

    def _look_in(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self._close_if_idle)

    def _close_if_idle(self) -> None:
        self.timeout_keep_alive_task = None
        if self._idle_since is None:
            return  # the next answer sets another
        left_s = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._look_in(left_s)
        else:
            self.timeout_keep_alive_handler()

    def _is_free(self) -> bool:
        """Nothing is being answered, and what was answered is taken."""
        return (self.cycle is None or self.cycle.response_complete) and not self.flow.write_paused

    def _is_plain(self, headers: Mapping[bytes, bytes]) -> bool:
        parser, length = self.parser, headers.get(b"content-length", b"")
        assert parser is not None
        return (
            parser.get_method() == b"POST"
            and parser.should_keep_alive()  # as 1.0 does only where it says so
            and (b"connection" not in headers or parser.get_http_version() == "1.1")
            and UNUSUAL.isdisjoint(headers)
            and 0 < len(length) <= MAX_DIGITS
            and int(length) <= self._max_bytes
        )

    def _begin_asgi(self) -> None:
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url = url
        for name, value in headers:
            super().on_header(name, value)
        super().on_headers_complete()

    def _tell_own_headers(self) -> None:
        now = self.server_state.default_headers
        self._told = now, b"".join([b"%s: %s\r\n" % header for header in now])
