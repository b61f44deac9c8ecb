"""Request bodies, read as a whole, with a limit for each body and for all together, which no framework has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Refusal = Callable[[int, str], Exception]


class BodyReader:
    def __init__(self, *, max_bytes: int, max_bytes_in_all: int, refusal: Refusal) -> None:
        """`max_bytes_in_all` limits all bodies that are not complete yet. `refusal` makes the exception to raise, from
        a status and a reason."""
        self._max_bytes, self._max_bytes_in_all, self._refusal = max_bytes, max_bytes_in_all, refusal
        self._bytes = 0

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        self._check(int(length))
        parts: list[bytes] = []
        size = 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise self._refusal(400, "the request ended before its body did")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                self._bytes += len(parts[-1])
                self._check(size)
                if not message.get("more_body"):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            self._bytes -= size

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            raise self._refusal(413, f"the body is larger than {self._max_bytes} bytes, which is the limit")
        if self._bytes > self._max_bytes_in_all:
            raise self._refusal(503, "too many large bodies are being received at once; send the request again")
