"""Errors about model endpoints, which users can fix."""

from __future__ import annotations


class EndpointError(Exception):
    """A model cannot be called; the message says why."""


class ModelNotFound(EndpointError, LookupError):
    """The endpoint has no such model."""


class EndpointSilent(EndpointError, ConnectionError):
    """The endpoint does not answer."""
