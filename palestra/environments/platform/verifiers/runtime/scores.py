"""Scores that a verifier may return."""

from __future__ import annotations

from typing import Any

MAX_SHOWN = 100  # characters of another value in the error


def score_of(returned: Any) -> float:
    """Converts a value. Raises ValueError: None is not a score, nor is a number below 0 or above 1."""
    if isinstance(returned, bool | int | float) and 0 <= returned <= 1:
        return float(returned)
    shown = repr(returned)[:MAX_SHOWN]
    raise ValueError(f"the verifier returned {shown}, but a score must be a number from 0 to 1")
