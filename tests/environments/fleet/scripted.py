"""Policies that know the solution. No pytest here: programs in other environments use them, too."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from palestra.environments.platform import PlatformTask

DONE = "<done>"
RESULT = "Tool result:\n"


def call(tool: str, /, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


class Script:
    """Each turn it reads the last observation and says the next call."""

    def __init__(self, task: PlatformTask) -> None:
        self._solution = task.template.solve(task.params)
        self._has_begun = False

    def __call__(self, observation: str | None) -> str:
        try:
            if self._has_begun and observation is not None:
                expected = self._solution.send(json.loads(observation.removeprefix(RESULT)))
            else:
                expected = next(self._solution)
        except StopIteration:
            return DONE
        self._has_begun = True
        return call(expected.tool, **expected.arguments)


def next_word(task: PlatformTask, told: Iterable[str]) -> str:
    """For whoever keeps nothing between turns: `told` are all observations until now."""
    script = Script(task)
    said = script(None)
    for observation in told:
        said = script(observation)
    return said
