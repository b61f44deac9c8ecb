"""Errors of a vLLM server, by what to do about them."""

from __future__ import annotations


class VllmError(Exception):
    """One line that says what happened, and where."""


class VllmRefused(VllmError):
    """The request is wrong: it would be refused again."""


class VllmUnknownModel(VllmError):
    """The server does not have the named model or adapter."""


class VllmBusy(VllmError):
    """The server asks to retry later."""


class VllmLost(VllmError):
    """The server does not answer, or not sensibly: another one may."""


class VllmUnfit(VllmError):
    """The server answers, but cannot be used as it was started."""
