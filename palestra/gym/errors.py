"""Errors of a gym, by the boundary that failed."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from palestra.environments.gym.errors import GymError
from palestra.types.gym_failures import FailureClass, RowFailure, error_text, is_refusal

MODEL_PATHS = ("/v1/responses", "/v1/chat/completions", "/v1/messages")
WRONG_REQUEST = frozenset({400, 413, 422})
"""Statuses by which a model server refuses a row. Others, e.g. for a wrong key or model, are not caused by the row."""


class GymConfigError(GymError, ValueError):
    """A file, a key or a reference is wrong. The message names it and the nearest valid name."""


class ServerStartError(GymError):
    """A server did not become healthy. The message has its last output."""


class WrongServerSettings(ServerStartError, ValueError):
    """A server cannot become healthy with the given settings."""


class UnreachableServer(GymError):
    """A server gave no answer within its time and its retries. The rollout failed, and may be tried again."""

    def __init__(self, name: str, reason: str, kind: FailureClass = FailureClass.SERVER_UNREACHABLE) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.failure = RowFailure.of(kind, str(self))


class PeerFailed(GymError):
    """A server answered with an error status where a result was needed."""

    def __init__(self, name: str, path: str, status: int, body: bytes, kind: FailureClass | None = None) -> None:
        """`kind` is the failure class, if it is known; otherwise it follows from the answer, or from path and
        status."""
        if kind is None:
            self.failure = answer_failure(name, path, status, body)
        else:
            self.failure = RowFailure.of(kind, f"{name}{path} answered {status}: {error_text(body)}", status)
        super().__init__(self.failure.reason)
        self.name = name
        self.status = status
        self.body = body


class BadReply(GymError, ValueError):
    """A server answered with success, but not with a valid answer."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.failure = RowFailure.of(FailureClass.BAD_ANSWER, reason)


class RolloutTimeout(GymError):
    """A rollout took longer than its agent allows."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.failure = RowFailure.of(FailureClass.TIMEOUT, reason)


class FieldProblem(TypedDict):
    """What is wrong with a field of a body, as pydantic says it to NeMo Gym's clients."""

    type: str
    loc: list[str | int]
    msg: str
    input: NotRequired[object]


class BadCall(GymError):
    """A request cannot be answered. `status` and `detail` are the answer, in FastAPI's format."""

    def __init__(self, status: int, detail: object) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.detail = detail


class UnknownSession(GymError):
    """The state of a session does not exist: it was never seeded here, has expired, or the server was restarted
    since."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.failure = RowFailure.of(FailureClass.SESSION_LOST, reason)


class JudgeError(GymError):
    """A judge gave no verdict. The row goes to the failures; it does not count as a wrong answer."""


def answer_failure(name: str, path: str, status: int, body: bytes) -> RowFailure:
    """Returns the failure that a server's error answer stands for."""
    return RowFailure.answered(f"{name}{path}", status, body, _kind_of(path, status))


def _kind_of(path: str, status: int) -> FailureClass:
    """Returns the class of an error that does not state it: e.g. from NeMo Gym's servers, or from a world that
    failed."""
    if path.endswith("/verify"):
        return FailureClass.VERIFIER_REFUSED if is_refusal(status) else FailureClass.VERIFIER_ERROR
    if path.endswith(MODEL_PATHS):
        return FailureClass.ROW_REFUSED if status in WRONG_REQUEST else FailureClass.MODEL_ERROR
    return FailureClass.ROW_REFUSED if is_refusal(status) else FailureClass.WORLD_ERROR


class CollectError(GymError):
    """The collection cannot begin or continue. The message says what to do."""


FieldPath = tuple[str | int, ...]


class BadRequest(BadCall):
    """A body that cannot be served, however often it is sent."""

    def __init__(self, place: FieldPath, message: str, *, kind: str = "value_error", given: object = None) -> None:
        super().__init__(422, [{"type": kind, "loc": ["body", *place], "msg": message, "input": given}])


class BadAnswer(PeerFailed):
    """An endpoint answered with success, but not with a valid answer."""

    def __init__(self, name: str, path: str, why: str, body: bytes) -> None:
        super().__init__(name, path, 502, body, FailureClass.BAD_ANSWER)
        text = f"{name}{path}: {why}; it answered: {body[:300].decode(errors='replace')}"
        self.failure = RowFailure.of(FailureClass.BAD_ANSWER, text)
        self.args = (text,)
