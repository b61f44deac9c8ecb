"""Tasks of the platform's smallest app, played by a script."""

from __future__ import annotations

import json
from typing import Any

import pytest

from palestra.environments.fleet import FleetTaskEnv, clear_caches
from palestra.environments.fleet.backends.embedded import live_instances
from palestra.environments.platform import PlatformTask, make_task

PUT, LARGEST = "keys-put_number-0b-17", "keys-largest-2-3"


@pytest.fixture(autouse=True)
def _no_instance_is_left():
    clear_caches()
    yield
    assert live_instances() == 0


def an_env(task_key: str = PUT, config: dict[str, Any] | None = None, **extras: Any) -> FleetTaskEnv:
    return FleetTaskEnv({"tasks_file": "platform:keys", **(config or {})}, {"task_key": task_key, **extras})


def call(tool: str, /, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def put_call(task_key: str = PUT) -> str:
    """The right one."""
    return call("put", value=make_task(task_key).params["value"])


class Script:
    """A policy that knows the solution: each turn it reads the last observation and says the next call."""

    def __init__(self, task: PlatformTask) -> None:
        self._solution = task.template.solve(task.params)
        self._has_begun = False

    def __call__(self, observation: str | None) -> str:
        try:
            if self._has_begun and observation is not None:
                wanted = self._solution.send(json.loads(observation.removeprefix("Tool result:\n")))
            else:
                wanted = next(self._solution)
        except StopIteration:
            return "<done>"
        self._has_begun = True
        return call(wanted.tool, **wanted.arguments)
