"""Errors of the platform, by who should see them."""

from __future__ import annotations


class PlatformError(Exception):
    """An error for the operator: no such app or task, an instance that is gone."""


class UnknownName(PlatformError, LookupError):
    """There is no such app or task."""


class ToolError(Exception):
    """An error for the model: what is wrong with its call, and what to try instead. The state is as it was before the
    call."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint
