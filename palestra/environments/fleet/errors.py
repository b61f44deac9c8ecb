"""What can go wrong below a Fleet task."""

from __future__ import annotations


class BackendError(RuntimeError):
    """An instance could not be made, or is gone. Says nothing about the policy."""
