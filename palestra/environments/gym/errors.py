"""Errors between a gym and its clients."""

from __future__ import annotations

from palestra.types.gym_failures import RowFailure
from palestra.util.json_types import JsonObject


class GymError(Exception):
    """Base class of all errors of a gym."""

    failure: RowFailure | None = None
    """How a rollout that ended with it is recorded. None: only the code that raised it knows."""


class NoGym(GymError, ConnectionError):
    """There is no head server of a gym at this address."""


class UnknownAgent(GymError, LookupError):
    """The gym has no agent of that name."""


class RowFailed(Exception):
    """An attempt to play a row failed."""

    def __init__(self, failure: RowFailure, answer: JsonObject | None = None) -> None:
        super().__init__(f"{failure.kind}: {failure.reason or 'no reason given'}")
        self.failure = failure
        self.answer = failure.fields() if answer is None else answer
        """The agent's answer, with the failure in it."""
