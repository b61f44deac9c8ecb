"""What can go wrong at the platform, by who is to hear of it."""

from __future__ import annotations


class PlatformError(Exception):
    """For whoever runs it: no such app or task, an instance that is gone."""


class UnknownName(PlatformError, LookupError):
    """There is no such app or task."""


class ToolError(Exception):
    """For the model: what its call got wrong, and what to try instead. The state is as it was before the call."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint
