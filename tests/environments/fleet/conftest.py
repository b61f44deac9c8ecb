"""Tasks of the platform's smallest app, played by a script."""

from __future__ import annotations

from typing import Any

import pytest

from palestra.environments.fleet import FleetTaskEnv, clear_caches
from palestra.environments.fleet.backends.embedded import live_instances
from palestra.environments.platform import make_task
from tests.environments.fleet.scripted import Script, call

__all__ = ["LARGEST", "PUT", "Script", "an_env", "call", "put_call"]

PUT, LARGEST = "keys-put_number-0b-17", "keys-largest-2-3"


@pytest.fixture(autouse=True)
def _no_instance_is_left():
    clear_caches()
    yield
    assert live_instances() == 0


def an_env(task_key: str = PUT, config: dict[str, Any] | None = None, **extras: Any) -> FleetTaskEnv:
    return FleetTaskEnv({"tasks_file": "platform:keys", **(config or {})}, {"task_key": task_key, **extras})


def put_call(task_key: str = PUT) -> str:
    """The right one."""
    return call("put", value=make_task(task_key).params["value"])
