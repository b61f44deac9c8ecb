"""Answers that leave whole: head and body in one write.

Owns: joining what is written within one turn of the loop. Never touches: what is written.

uvicorn writes the head of an answer, then its body. Each write is a system call, and each wakes the client: of a short
call that was an eighth of the time, on either side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LARGE_BYTES = 1 << 16  # to copy it takes longer than another call


class WholeAnswers(HttpToolsProtocol):
    joining: Joining

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.joining = Joining(transport, self.loop)
        super().connection_made(self.joining)  # type: ignore[arg-type]


class Joining:
    """A transport. What is written waits for what comes right behind it, or for the end of the turn."""

    __slots__ = ("_first", "_loop", "_transport", "is_closing")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self.is_closing = transport.is_closing
        self._first = b""

    def write(self, data: bytes) -> None:
        if self.is_closing():  # whoever writes is told at once, and stops
            self._first = b""
            self._transport.write(data)
        elif len(data) > LARGE_BYTES:
            self._flush()
            self._transport.write(data)
        elif self._first:
            first, self._first = self._first, b""
            self._transport.write(b"".join((first, data)))
        else:
            self._first = data
            self._loop.call_soon(self._flush)

    def write_whole(self, data: bytes) -> None:
        """What is an answer by itself. The end of the one before it may still be here."""
        if self._first:
            self._flush()
        self._transport.write(data)

    def writelines(self, data: Iterable[bytes]) -> None:
        self._flush()
        self._transport.writelines(data)

    def write_eof(self) -> None:
        self._flush()
        self._transport.write_eof()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        first, self._first = self._first, b""
        if first and not self.is_closing():
            self._transport.write(first)
