"""Waits for what happens, not for a time to pass."""

from __future__ import annotations

import inspect
import textwrap
import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""For a machine that is busy with other things; what is waited for takes a second or so."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.2
"""Between two looks: what takes long is looked at less often, since a look may cost a server some milliseconds."""


def until(condition: Callable[[], object], *, timeout_s: float = PATIENCE_S, details: Callable[[], str] = str) -> None:
    """Returns when the condition holds. A timeout fails with the condition's source and `details`."""
    deadline, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for:\n{source_of(condition)}\n{details()}")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.2, LONGEST_PAUSE_S)


def source_of(condition: Callable[[], object]) -> str:
    try:
        return textwrap.dedent(inspect.getsource(condition)).strip()
    except (OSError, TypeError):  # it is not written in Python, such as a method of a file
        return repr(condition)
