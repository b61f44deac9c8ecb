"""Waits for what happens, not for a time to pass."""

from __future__ import annotations

import inspect
import textwrap
import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""For a machine that is busy with other things; what is waited for takes a second or so."""
POLL_S = 0.02


def until(condition: Callable[[], object], *, timeout_s: float = PATIENCE_S, told: Callable[[], str] = str) -> None:
    """Returns when the condition holds. A timeout fails with the condition's source and what `told` says."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for:\n{source_of(condition)}\n{told()}")
        time.sleep(POLL_S)


def source_of(condition: Callable[[], object]) -> str:
    try:
        return textwrap.dedent(inspect.getsource(condition)).strip()
    except (OSError, TypeError):  # it is not written in Python, such as a method of a file
        return repr(condition)
