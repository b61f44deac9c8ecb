"""Client sessions: heartbeats, ends, and what ends with them.

Owns: which sessions are alive. Never touches: HTTP, workers: the owners of models and samplers are asked to release
them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class TinkerSession:
    session_id: str
    owner: str
    last_heard: float = field(default_factory=time.monotonic)
    last_heard_at: float = field(default_factory=time.time)
    is_dirty: bool = False
    """Whether its last sign of life is newer than the one in the database."""

    def touch(self) -> None:
        self.last_heard, self.last_heard_at, self.is_dirty = time.monotonic(), time.time(), True


class TinkerSessions:
    """The active sessions."""

    def __init__(self) -> None:
        self.active: dict[str, TinkerSession] = {}

    def find(self, session_id: str, owner: str) -> TinkerSession | None:
        session = self.active.get(session_id)
        return session if session is not None and session.owner == owner else None

    def stale(self, timeout_s: float) -> list[TinkerSession]:
        """Returns expired sessions, by this process's own clock: time in which the server was down does not count
        against a client."""
        limit = time.monotonic() - timeout_s
        return [s for s in self.active.values() if s.last_heard < limit]

    def take_dirty(self) -> dict[str, float]:
        found = {s.session_id: s.last_heard_at for s in self.active.values() if s.is_dirty}
        for session in self.active.values():
            session.is_dirty = False
        return found
