"""Errors of a gym, by the boundary that failed.

Owns: the error tree, and the failure class of each. Never touches: the form of an error over HTTP.
"""

from __future__ import annotations

from palestra.environments.gym.errors import GymError
from palestra.types.gym_failures import FailureClass, RowFailure, is_refusal, plain_words

MODEL_PATHS = ("/v1/responses", "/v1/chat/completions", "/v1/messages")
WRONG_REQUEST = frozenset({400, 413, 422})
"""Statuses by which a model server refuses a row. Others, as of a wrong key or model, are no row's fault."""


class GymConfigError(GymError, ValueError):
    """A file, a key or a reference is wrong. The message names it and the nearest valid name."""


class ServerStartError(GymError):
    """A server did not become healthy. The message has its last words."""


class WrongServerSettings(ServerStartError, ValueError):
    """It never will with what the config says of it."""


class UnreachableServer(GymError):
    """A peer gave no answer, within its time and its retries. The rollout failed, and may be tried again."""

    def __init__(self, name: str, reason: str, kind: FailureClass = FailureClass.SERVER_UNREACHABLE) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.failure = RowFailure.of(kind, str(self))


class PeerFailed(GymError):
    """A peer answered with an error status where an answer was needed."""

    def __init__(self, name: str, path: str, status: int, body: bytes, kind: FailureClass | None = None) -> None:
        """`kind`: what it is, where that is known; else what the answer says, or its path and status mean."""
        if kind is None:
            self.failure = answer_failure(name, path, status, body)
        else:
            self.failure = RowFailure.of(kind, f"{name}{path} answered {status}: {plain_words(body)}", status)
        super().__init__(self.failure.reason)
        self.name = name
        self.status = status
        self.body = body


class BadReply(GymError, ValueError):
    """A peer answered with success, and with something else than an answer."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.failure = RowFailure.of(FailureClass.BAD_ANSWER, reason)


class RolloutTimeout(GymError):
    """A rollout took longer than its agent lets it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.failure = RowFailure.of(FailureClass.TIMEOUT, reason)


class BadCall(GymError):
    """What was asked for cannot be answered. `status` and `detail` are the answer, in FastAPI's shape."""

    def __init__(self, status: int, detail: object) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.detail = detail


class UnknownSession(GymError):
    """The state of a session is gone: it was never seeded here, aged out, or the server was started anew since."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.failure = RowFailure.of(FailureClass.SESSION_LOST, reason)


class JudgeError(GymError):
    """A judge gave no verdict. The row goes to the failures, it is no wrong answer."""


def answer_failure(name: str, path: str, status: int, body: bytes) -> RowFailure:
    """The failure that a server's error answer stands for."""
    return RowFailure.answered(f"{name}{path}", status, body, _kind_of(path, status))


def _kind_of(path: str, status: int) -> FailureClass:
    """What an error is that says nothing about itself: as of NeMo Gym's servers, or of a world that broke."""
    if path.endswith("/verify"):
        return FailureClass.VERIFIER_REFUSED if is_refusal(status) else FailureClass.VERIFIER_ERROR
    if path.endswith(MODEL_PATHS):
        return FailureClass.ROW_REFUSED if status in WRONG_REQUEST else FailureClass.MODEL_ERROR
    return FailureClass.ROW_REFUSED if is_refusal(status) else FailureClass.WORLD_ERROR


class CollectError(GymError):
    """The collection cannot begin or go on. The message says what to do."""


Place = tuple[str | int, ...]


class BadRequest(BadCall):
    """A body that cannot be served, however often it is sent."""

    def __init__(self, place: Place, message: str, *, kind: str = "value_error", given: object = None) -> None:
        super().__init__(422, [{"type": kind, "loc": ["body", *place], "msg": message, "input": given}])


class BadAnswer(PeerFailed):
    """An endpoint answered with success, and with something else than an answer."""

    def __init__(self, name: str, path: str, why: str, body: bytes) -> None:
        super().__init__(name, path, 502, body, FailureClass.BAD_ANSWER)
        told = f"{name}{path}: {why}; it answered: {body[:300].decode(errors='replace')}"
        self.failure = RowFailure.of(FailureClass.BAD_ANSWER, told)
        self.args = (told,)
