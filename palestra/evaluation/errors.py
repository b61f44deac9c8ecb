"""Errors that end an evaluation, which can be resumed."""

from __future__ import annotations

from palestra.endpoints.errors import EndpointError


class EvaluationError(EndpointError):
    """The evaluation cannot go on; the message says why."""
