"""The messages between gym servers: a call and its answer, the same over HTTP and within one process.

Within one process bodies are passed as they are, without a copy: **a receiver never changes a body.** To change one,
make a new mapping (`{**row, "response": response}`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from msgspec import Struct, field

from palestra.gym.errors import BadReply
from palestra.net.http_client import NO_HEADERS

Cookies = Mapping[str, str]
NO_COOKIES: Cookies = {}


class GymRequest(Struct, kw_only=True):
    """One POST, as a server gets it."""

    path: str
    """`/verify`, `/v1/responses`, `/<tool>`; a prefix `/ng-rollout/<id>` is removed."""
    body: Any
    """Parsed JSON; read only."""
    cookies: Cookies = NO_COOKIES
    """All cookies that the caller sent: agents pass them on."""
    session_id: str = ""
    """The session of this server's own cookie, or a new one. Set by the server's endpoint."""
    rollout_id: str | None = None
    """The rollout in the path's prefix."""
    captures_tokens: bool = False
    """Whether the prefix continued with `/training-token-capture`."""
    headers: Mapping[str, str] = NO_HEADERS
    """Headers by lower-case name; empty within a process."""


class GymResponse(Struct, kw_only=True):
    status: int = 200
    body: Any = None
    """A JSON value; or `bytes`, which are sent as they are, with `content_type`."""
    cookies: dict[str, str] = field(default_factory=dict)
    """Cookies to set at the caller, in addition to the session's own, which the endpoint adds."""
    content_type: str = "application/json"

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    def raw(self) -> bytes:
        """Returns the body as it is sent over a socket."""
        return self.body if isinstance(self.body, bytes) else encoded(self.body)

    def value(self) -> Any:
        """Returns the body as parsed JSON. Raises BadReply if it is not JSON."""
        if not isinstance(self.body, bytes):
            return self.body
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            raise BadReply(f"the answer is not JSON: {self.body[:300].decode(errors='replace')}") from None


def encoded(value: object) -> bytes:
    """Encodes JSON; numbers of numpy and dataclasses are accepted, NaN becomes null."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
