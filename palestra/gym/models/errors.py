"""What a model server refuses, and answers of an endpoint that make no sense.

Owns: the two errors, in FastAPI's words where a caller reads them. Never touches: the network.
"""

from __future__ import annotations

from palestra.gym.errors import BadCall, PeerFailed
from palestra.types.gym_failures import Failure, FailureClass

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
        self.failure = Failure.of(FailureClass.BAD_ANSWER, told)
        self.args = (told,)
