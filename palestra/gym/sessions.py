"""Sessions of a gym server: a session id in a signed cookie.

NeMo Gym signs with the cookie's own name, which is public. Here the key is derived from the gym's secret, so that
a client cannot forge a session; the cookie's name is part of it, so that one server's cookie is invalid for another.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from uuid import uuid4

MAX_AGE_S = 14 * 24 * 3600
SIGNATURE_BYTES = 16


class SessionSigner:
    """Signs for one server, and for one purpose if there are several."""

    __slots__ = ("_key", "name")

    def __init__(self, name: str, secret: str, purpose: str = "cookie") -> None:
        self.name = name
        self._key = hashlib.sha256(f"{purpose}\0{name}\0{secret}".encode()).digest()

    def signed(self, session_id: str) -> str:
        return f"{session_id}.{self._signature(session_id)}"

    def session_of(self, text: str) -> str | None:
        """Returns the session id; None: the signature is not ours."""
        session_id, _, signature = text.rpartition(".")
        is_ours = hmac.compare_digest(signature.encode(), self._signature(session_id).encode())
        return session_id if session_id and is_ours else None

    def session_from(self, cookies: Mapping[str, str]) -> str:
        """Returns the session of the cookie, else a new one: as in NeMo Gym an invalid cookie is no error."""
        found = cookies.get(self.name)
        return (found and self.session_of(found)) or str(uuid4())

    def _signature(self, session_id: str) -> str:
        digest = hmac.digest(self._key, session_id.encode(), "sha256")
        return base64.urlsafe_b64encode(digest[:SIGNATURE_BYTES]).rstrip(b"=").decode()
