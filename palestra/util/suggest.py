"""Suggestions for an unknown name: the nearest known one, or all that exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_NAME = 64  # a longer one was no slip of the pen, and comparing it takes time


def nearest(name: object, known: Iterable[object]) -> str | None:
    found = difflib.get_close_matches(str(name)[:MAX_NAME], [str(one) for one in known], n=1)
    return found[0] if found else None


def did_you_mean(name: object, known: Iterable[object], *, otherwise: str = "there are") -> str:
    """`did you mean X?`, or `there are: X, Y`, for the end of an error's text."""
    names = [str(one) for one in known]
    near = nearest(name, names)
    return f"did you mean {near}?" if near else f"{otherwise}: {', '.join(names) or 'none'}"
