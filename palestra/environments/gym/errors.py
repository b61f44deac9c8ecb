"""Errors between a gym and its clients."""

from __future__ import annotations

from palestra.types.gym_failures import RowFailure
from palestra.util.json_types import JsonObject


class GymError(Exception):
    """Anything that goes wrong with a gym."""

    failure: RowFailure | None = None
    """What a rollout that ended with it is recorded as. None: nobody but the one who raised it can tell."""


class NoGym(GymError, ConnectionError):
    """Nothing that answers is a gym's head."""


class UnknownAgent(GymError, LookupError):
    """The gym has no agent of that name."""


class RowFailed(Exception):
    """An attempt to play a row came to nothing."""

    def __init__(self, failure: RowFailure, answer: JsonObject | None = None) -> None:
        super().__init__(f"{failure.kind}: {failure.reason or 'no reason given'}")
        self.failure = failure
        self.answer = failure.fields() if answer is None else answer
        """What its agent said, with the failure in it."""
