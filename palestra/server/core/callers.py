"""The caller of a request: an owner with a right, by a key or by the key of an attempt.

Owns: the record. Never touches: authentication, which is in `server.http.auth`.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from palestra.store.records import Key, Rights
from palestra.types.episodes import LeaseRef

LOCAL_OWNER = "local"
TRAINERS = (Rights.ADMIN, Rights.TRAINER)
EPISODE_PREFIX = "ep-"  # of keys that are no row anywhere: the broker knows them


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
        """What its traces are found by."""
        return f"{self.episode_id}#{self.attempt}"


@dataclass(frozen=True, slots=True)
class Caller:
    owner: str
    right: Rights
    key: Key | None = None
    attempt: AttemptRef | None = None
    """Whose key it is, with the right `episode`."""
    traceparent: str = ""
    """As such a player sent it."""

    @property
    def who(self) -> str:
        """Among the owner's: those of one key, or of one attempt, are not told apart."""
        if self.attempt is not None:
            return self.attempt.origin
        return "" if self.key is None else str(self.key.key_id)


ANYBODY = Caller(LOCAL_OWNER, Rights.ADMIN)
"""On a loopback address, where there are no keys."""
