"""uvicorn's HTTP protocol, with limits on the resources of clients that are not authenticated yet.

Imports nothing of ours: servers that were written for NeMo Gym load this file in environments without Palestra.
"""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

FIELD_EXTRA_BYTES = 4  # the colon, the space and the line's end


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpBounds:
    max_head_bytes: int = 64 << 10
    """Maximum size of the request line and all header fields, and of the trailers of a chunked body."""
    max_fields: int = 100
    head_timeout_s: float = 20.0
    """Time limit from the first byte of a head to its last; for the first head, from the start of the connection."""
    max_unread_bytes: int = 20 << 20
    """How much is read of a body after its request was answered: clients that look at the answer only at the end of
    their body should get to see it, so it is more than the longest body that most routes take. Then the connection is
    closed."""
    unread_answer_s: float = 120.0
    """How long a client may leave a ready answer unread. Then the connection is cut."""
    max_waiting: int = 16_384
    """Connections without a request under way, and at most half of the files that the process may open. Beyond it those
    that have waited longest are closed."""
    max_waiting_bytes: int = 64 << 20
    """Memory of all heads that are not complete yet. Beyond it, the oldest connections are closed."""


class HeadTooLarge(Exception):
    """Raised inside the parser, which then stops reading."""


class BoundedHttp(HttpToolsProtocol):
    def __init__(self, *args: Any, bounds: HttpBounds, waiting: WaitingConnections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bounds, self._waiting = bounds, waiting
        self._is_in_head = False
        self._kept_bytes = 0
        """What the parser was given since it last handed over a head or a part of a body."""
        self._shared_bytes = 0
        """What it was given last, if that ended one request and began the head of the next."""
        self._has_handed_over = False
        """Within what is being read just now."""
        self._unread_bytes = 0
        self._is_refused = False
        self._is_too_large = False
        self._deadline: asyncio.TimerHandle | None = None
        self._unread_answer: asyncio.TimerHandle | None = None
        """Set while an answer lies ready that the client does not take."""

    def _unsupported_upgrade_warning(self) -> None:
        """A request for a WebSocket is an ordinary request here, which a route may answer."""

    # Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline()
        self._waiting.add(self, 0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.remove(self)
        self._end_deadline()
        if self._unread_answer is not None:
            self._unread_answer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._discard(len(data))
            return
        self._has_handed_over = False
        super().data_received(data)
        if self._is_refused or self.transport.is_closing():
            return
        if self._has_handed_over:
            self._shared_bytes = len(data) if self._is_in_head else 0
        else:
            self._kept_bytes += len(data)
            if self._kept_bytes > self._bounds.max_head_bytes:
                self._refuse_size()
                return
        self._waiting.hold(self, self._held_bytes)
        if self._is_in_head:
            self._set_deadline()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unread_answer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_unread_answer()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._waiting.add(self, self._held_bytes)
            if self.cycle.more_body:
                self._set_deadline()

    # The parser's callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._unread_bytes = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > self._bounds.max_fields:
            self._is_too_large = True
            raise HeadTooLarge

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + FIELD_EXTRA_BYTES for name, value in self.headers)
        if size > self._bounds.max_head_bytes:
            self._is_too_large = True
            raise HeadTooLarge
        self._is_in_head = False
        self._handed_over()
        self._end_deadline()
        self._waiting.remove(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._handed_over()
        super().on_body(body)
        if self.cycle is not None and self.cycle.response_complete:
            self._discard(len(body))

    def on_message_complete(self) -> None:
        self._handed_over()
        self._end_deadline()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers a request that the parser refused."""
        if self._is_too_large:
            self._refuse_size()
        else:
            super().send_400_response(msg)

    # Bounds

    @property
    def _held_bytes(self) -> int:
        return self._kept_bytes + self._shared_bytes

    def _handed_over(self) -> None:
        self._has_handed_over, self._kept_bytes = True, 0

    def _set_deadline(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self._bounds.head_timeout_s, self._time_is_over)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _watch_unread_answer(self) -> None:
        if self._unread_answer is None:
            self._look_at_unread_answer(None)

    def _look_at_unread_answer(self, before: int | None) -> None:
        """Cuts the connection: closing it would wait until the client has read everything."""
        self._unread_answer = None
        left = self.transport.get_write_buffer_size()
        if before is not None and left >= before:
            self.transport.abort()
        elif left:
            wait_s = self._bounds.unread_answer_s
            self._unread_answer = self.loop.call_later(wait_s, self._look_at_unread_answer, left)

    def _time_is_over(self) -> None:
        self._deadline = None
        if self._is_in_head and not self._is_refused:
            self._refuse(408, f"the head of a request must arrive within {self._bounds.head_timeout_s:g} seconds")
        self.transport.close()

    def _refuse_size(self) -> None:
        bounds = self._bounds
        message = f"the head of a request may have at most {bounds.max_head_bytes} bytes and {bounds.max_fields} fields"
        self._refuse(431, message)

    def _refuse(self, status: int, message: str) -> None:
        """The client may still be sending: it sees the answer only if the connection stays for a while."""
        self._is_refused = True
        self._end_deadline()
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # amid another answer there is no place for this one
            return
        body = f'{{"detail": "{message}"}}'.encode()
        lines = b"".join([b"%s: %s\r\n" % header for header in self.server_state.default_headers])
        self.transport.write(
            b"%s%scontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
            % (STATUS_LINE[status], lines, len(body), body)
        )
        if self.transport.can_write_eof():  # TLS cannot
            self.transport.write_eof()
        self._set_deadline()

    def _discard(self, size: int) -> None:
        self._unread_bytes += size
        if self._unread_bytes > self._bounds.max_unread_bytes:
            self.transport.close()


class WaitingConnections:
    """Connections without a running request and the bytes they hold of the next one, the longest waiting first."""

    def __init__(self, bounds: HttpBounds) -> None:
        self._max = min(bounds.max_waiting, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._max_bytes = bounds.max_waiting_bytes
        self._held: dict[BoundedHttp, int] = {}
        self._bytes = 0

    def add(self, connection: BoundedHttp, size: int) -> None:
        self._held.setdefault(connection, 0)
        self.hold(connection, size)
        if len(self._held) > self._max:
            self._close(next(iter(self._held)))

    def hold(self, connection: BoundedHttp, size: int) -> None:
        """Counts the bytes of a connection that waits. One with a request under way holds none; what is behind it
        counts later."""
        if (before := self._held.get(connection)) is None:
            return
        self._held[connection] = size
        self._bytes += size - before
        while self._bytes > self._max_bytes:
            self._close(next(one for one, held in self._held.items() if held))

    def remove(self, connection: BoundedHttp) -> None:
        self._bytes -= self._held.pop(connection, 0)

    def _close(self, connection: BoundedHttp) -> None:
        self.remove(connection)
        connection.transport.abort()


def bounded_http(bounds: HttpBounds) -> Any:
    """Returns the protocol for `uvicorn.Config(http=…)`, which calls it as it would a class. Its connections share what
    they may hold."""
    return partial(BoundedHttp, bounds=bounds, waiting=WaitingConnections(bounds))
