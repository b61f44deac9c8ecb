"""Errors of Fleet tasks and their backends."""

from __future__ import annotations


class BackendError(RuntimeError):
    """An instance could not be made, or is gone. This says nothing about the policy."""
