"""What goes wrong in a gym, by the boundary that broke.

Owns: the error tree. Never touches: how an error is told over HTTP.
"""

from __future__ import annotations

from typing import Any


class GymError(Exception):
    """Any of these."""


class GymConfigError(GymError, ValueError):
    """A file, a key or a reference is wrong. The message names it and the nearest valid name."""


class ServerStartError(GymError):
    """A server did not become healthy. The message has its last words."""


class UnreachableServer(GymError):
    """A peer gave no answer, within its time and its retries. The rollout failed, and may be tried again."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name


class PeerFailed(GymError):
    """A peer answered with an error status where an answer was needed."""

    def __init__(self, name: str, path: str, status: int, body: bytes) -> None:
        super().__init__(f"{name}{path} answered {status}: {body[:500].decode(errors='replace')}")
        self.name = name
        self.status = status
        self.body = body


class BadCall(GymError):
    """What was asked for cannot be answered. `status` and `detail` are the answer, in FastAPI's shape."""

    def __init__(self, status: int, detail: Any) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.detail = detail


class UnknownSession(GymError):
    """The state of a session is gone: it was never seeded here, aged out, or the server was started anew since."""


class JudgeError(GymError):
    """A judge gave no verdict. The row goes to the failures, it is no wrong answer."""
