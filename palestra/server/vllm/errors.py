"""What can go wrong with a vLLM server, by what to do about it."""

from __future__ import annotations


class VllmError(Exception):
    """One line that says what happened, and where."""


class VllmRefused(VllmError):
    """The request is at fault: it would be refused again."""


class VllmUnknownModel(VllmError):
    """It does not have the model or adapter that was named."""


class VllmBusy(VllmError):
    """It asks to come back."""


class VllmLost(VllmError):
    """It does not answer, or not with sense: another one may."""


class VllmUnfit(VllmError):
    """It answers, but cannot be used as it was started."""
