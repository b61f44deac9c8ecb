"""Errors about checkpoints, which users can fix."""

from __future__ import annotations

from palestra.runs.saved_checkpoints import CheckpointError, CheckpointNotFound

__all__ = ["CheckpointError", "CheckpointNotFound", "CheckpointServerError"]


class CheckpointServerError(CheckpointError, ConnectionError):
    """The server with the checkpoint does not answer."""
