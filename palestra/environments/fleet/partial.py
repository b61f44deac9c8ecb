"""Partial rewards: what share of a verifier's own checks was met, as far as it printed them.

Owns: reading what verifiers print. Never touches: scores that are not 0.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

BLOCK = r">>> {0}_ACCUMULATOR >>>\n(.*?)\n<<< {0}_ACCUMULATOR <<<"
ERRORS, SUCCESSES = (re.compile(BLOCK.format(name), re.DOTALL) for name in ("ERROR", "SUCCESS"))
APP_LINE = re.compile(r"^App (.+): ([01])\s*$", re.MULTILINE)
NOTHING_HAPPENED = re.compile(r"no (?:unexpected|other|unwanted) (?:database )?changes", re.IGNORECASE)
"""A check that is met by doing nothing is no part of a success."""


def partial_score(stdout: str) -> float:
    """0 to below 1."""
    apps = APP_LINE.findall(stdout)
    if apps:
        passed = [one == "1" for _, one in apps]
        earned = _counted(SUCCESSES, stdout)
        return sum(passed) / len(passed) if earned and not all(passed) else 0.0
    met, missed = len(_counted(SUCCESSES, stdout)), len(_listed(ERRORS, stdout))
    return met / (met + missed) if missed else 0.0


def _counted(block: re.Pattern[str], stdout: str) -> list[Any]:
    return [one for one in _listed(block, stdout) if not NOTHING_HAPPENED.search(str(one))]


def _listed(block: re.Pattern[str], stdout: str) -> list[Any]:
    found: list[Any] = []
    for text in block.findall(stdout):
        value = _read(text)
        found += value if isinstance(value, list) else []
    return found


def _read(text: str) -> Any:
    """JSON or, as most print it, Python's own way."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
