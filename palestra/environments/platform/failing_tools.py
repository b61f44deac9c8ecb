"""Tools that fail now and then, for no reason of the caller's: the same calls of a task fail in every instance of it.

Never two calls in a row fail, and one that fails has changed nothing, so that whoever repeats it loses one turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from palestra.environments.platform.errors import ToolError
from palestra.net.mcp import ToolResult

FAILING = "_FAILING_TOOLS"
"""The variable of an instance that says which calls fail: percent, a stroke, and the number of the draw."""
UNAVAILABLE = "unavailable"
SCALE = 100


def failing_variable(percent: int, number: int) -> dict[str, str]:
    return {FAILING: f"{percent}/{number}"} if percent else {}


def check_available(variables: Mapping[str, str], turn: int, tool: str) -> None:
    """Raises ToolError if the call of this turn fails."""
    rate, _, draw = variables.get(FAILING, "").partition("/")
    if not rate.isdecimal():
        return
    if _fails(int(rate), draw, turn) and not (turn and _fails(int(rate), draw, turn - 1)):
        raise ToolError(UNAVAILABLE, f"{tool} is not available at the moment, nothing was done", "make the call again")


def _fails(percent: int, draw: str, turn: int) -> bool:
    digest = hashlib.blake2b(f"{draw}/{turn}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) % SCALE < percent


def is_passing(result: ToolResult) -> bool:
    """Whether a call failed for the moment only."""
    return result.text.startswith(f'{{"error":"{UNAVAILABLE}"')
