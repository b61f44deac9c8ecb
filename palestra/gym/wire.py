"""What passes between gym servers: a call and its answer, the same over HTTP and within one process.

Owns: the two records, JSON. Never touches: sockets, sessions, what a path means.

Within one process bodies are handed over as they are, without a copy: **nobody changes a body it was given.** Who wants
another one makes a new mapping (`{**row, "response": response}`).
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
    """`/verify`, `/v1/responses`, `/<tool>`; a prefix `/ng-rollout/<id>` is taken off."""
    body: Any
    """Parsed JSON. Read only."""
    cookies: Cookies = NO_COOKIES
    """All that the caller sent: agents pass them on."""
    session_id: str = ""
    """From this server's own cookie, or fresh. Filled in by the server's front."""
    rollout_id: str | None = None
    """From the path's prefix."""
    captures_tokens: bool = False
    """The prefix went on with `/training-token-capture`."""
    headers: Mapping[str, str] = NO_HEADERS
    """By lower-case name; empty within a process."""


class GymResponse(Struct, kw_only=True):
    status: int = 200
    body: Any = None
    """JSON-able; or `bytes`: sent as they are, of `content_type`."""
    cookies: dict[str, str] = field(default_factory=dict)
    """To be set at the caller, beside the session's own which the front adds."""
    content_type: str = "application/json"

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    def raw(self) -> bytes:
        """The body as it goes over a socket."""
        return self.body if isinstance(self.body, bytes) else encoded(self.body)

    def value(self) -> Any:
        """The body as parsed JSON. Raises BadReply where it is none."""
        if not isinstance(self.body, bytes):
            return self.body
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            raise BadReply(f"the answer is not JSON: {self.body[:300].decode(errors='replace')}") from None


def encoded(value: object) -> bytes:
    """JSON; numbers of numpy and dataclasses pass, NaN becomes null."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
