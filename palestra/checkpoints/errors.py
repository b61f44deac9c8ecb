"""Errors about checkpoints, which users can fix."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint cannot be read, downloaded or exported; the message says why."""


class CheckpointNotFound(CheckpointError, LookupError):
    """There is no such checkpoint."""


class CheckpointServerError(CheckpointError, ConnectionError):
    """The server with the checkpoint does not answer."""
