"""Errors that end an evaluation, which can be resumed."""

from __future__ import annotations


class EvaluationError(Exception):
    """The evaluation cannot go on; the message says why."""


class EndpointSilent(EvaluationError, ConnectionError):
    """The model endpoint does not answer."""
