"""The little HTTP that the faces share: bodies, answers, refusals.

Owns: reading with a bound, JSON. Never touches: who asks, what for. Statuses are those that Fleet's SDK takes as final:
404 and 5xx make it wait and try again for seconds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec

from palestra.net.bodies import BodyReader

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BODY_BYTES = 4 << 20  # a tool call with its texts, a verifier's bundle
MAX_BYTES_IN_ALL = 256 << 20  # of bodies that are on their way
JSON_TYPE = (b"content-type", b"application/json")


class Refusal(Exception):
    """An answer that is not what was asked for; `detail` as Fleet's SDK reads it."""

    def __init__(self, status: int, detail: str | dict[str, Any]) -> None:
        super().__init__(str(detail))
        self.status, self.detail = status, detail


class Headers:
    """Of a request, by lower-case name."""

    def __init__(self, raw: Iterable[tuple[bytes, bytes]]) -> None:
        self._raw = list(raw)
        self._found = dict(reversed(self._raw))

    def get(self, name: str) -> str | None:
        """Without the spaces around it, which parsers leave there."""
        value = self._found.get(name.encode())
        return None if value is None else value.decode("latin-1").strip(" \t")

    def getlist(self, name: str) -> list[str]:
        return [value.decode("latin-1") for n, value in self._raw if n == name.encode()]


def body_reader(max_bytes: int = MAX_BODY_BYTES) -> BodyReader:
    return BodyReader(max_bytes=max_bytes, max_bytes_in_all=MAX_BYTES_IN_ALL, refusal=Refusal)


def json_of(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise Refusal(400, f"the body is not JSON that can be read: {e}") from None


def object_of(body: bytes) -> dict[str, Any]:
    """An empty one is an object without fields."""
    found = json_of(body or b"{}")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise Refusal(400, f"the body is a JSON object, found {type(found).__name__}")
    return found


async def answer(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [JSON_TYPE, length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def answer_json(send: Send, content: Any, status: int = 200) -> None:
    await answer(send, status, msgspec.json.encode(content))


async def refuse(send: Send, refusal: Refusal) -> None:
    await answer_json(send, {"detail": refusal.detail}, refusal.status)
