"""The caller of a request: an owner with rights, identified by a key or by the key of an attempt.

Owns: the record. Never touches: authentication, which is in `server.http.auth`.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from palestra.store.records import Key, Rights
from palestra.types.episodes import LeaseRef

LOCAL_OWNER = "local"
TRAINERS = (Rights.ADMIN, Rights.TRAINER)
EPISODE_PREFIX = "ep-"  # prefix of keys that are not in the database: the broker knows them


class AttemptRef(Struct, frozen=True, gc=False):
    """One attempt to play an episode."""

    owner: str
    episode_id: str
    attempt: int

    @property
    def ref(self) -> LeaseRef:
        return LeaseRef(episode_id=self.episode_id, attempt=self.attempt)

    @property
    def origin(self) -> str:
        """The name by which its traces are found."""
        return f"{self.episode_id}#{self.attempt}"


@dataclass(frozen=True, slots=True)
class Caller:
    owner: str
    right: Rights
    key: Key | None = None
    attempt: AttemptRef | None = None
    """The attempt whose key it is, with the rights `episode`."""
    traceparent: str = ""
    """The trace context that such a player sent."""

    @property
    def who(self) -> str:
        """Distinguishes the owner's keys and attempts."""
        if self.attempt is not None:
            return self.attempt.origin
        return "" if self.key is None else str(self.key.key_id)


LOCAL_ADMIN = Caller(LOCAL_OWNER, Rights.ADMIN)
"""Every caller on a loopback address, if there are no keys."""
