"""The rollout that a call belongs to: an id in front of the path, and in the task that serves it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send

from nemo_gym.config_types import ROLLOUT_PATH_PREFIX, TOKEN_CAPTURE_PATH_SEGMENT
from nemo_gym.global_config import (
    ATTEMPT_INDEX_KEY_NAME,
    ROLLOUT_ID_KEY_NAME,
    ROLLOUT_INDEX_KEY_NAME,
    TASK_INDEX_KEY_NAME,
)
from nemo_gym.json_types import JsonMapping

_CURRENT: ContextVar[str | None] = ContextVar("rollout_id", default=None)
_PREFIXED = re.compile(
    rf"/{ROLLOUT_PATH_PREFIX}/(?P<id>[A-Za-z0-9][A-Za-z0-9._-]*)(/{TOKEN_CAPTURE_PATH_SEGMENT})?(?P<rest>/.*)"
)


def maybe_rollout_id_from_run_body(body: BaseModel | JsonMapping | None) -> str | None:
    """Its own, or made of task and rollout; a retry has another."""
    if not isinstance(body, BaseModel | Mapping):
        return None

    def field(name: str) -> Any:
        return body.get(name) if isinstance(body, Mapping) else getattr(body, name, None)

    task, rollout = field(TASK_INDEX_KEY_NAME), field(ROLLOUT_INDEX_KEY_NAME)
    found = field(ROLLOUT_ID_KEY_NAME) or (None if task is None or rollout is None else f"{task}-{rollout}")
    attempt = int(field(ATTEMPT_INDEX_KEY_NAME) or 0)
    return f"{found}-a{attempt}" if found and attempt > 0 else found


def current_rollout_id() -> str | None:
    return _CURRENT.get()


@contextmanager
def rollout_context(rollout_id: str | None) -> Iterator[None]:
    token = _CURRENT.set(rollout_id)
    try:
        yield
    finally:
        _CURRENT.reset(token)


class RolloutContextMiddleware:
    """Takes the prefix off; calls that are made meanwhile know the id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = _PREFIXED.fullmatch(scope.get("path", "")) if scope["type"] == "http" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        bare = {**scope, "path": found["rest"], "raw_path": found["rest"].encode()}
        with rollout_context(found["id"]):
            await self._app(bare, receive, send)
