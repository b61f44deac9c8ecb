"""Copies of an environment in the middle of an episode, from which other episodes go on.

An environment with `snapshot() -> bytes` and `restore(data)` copies itself: `restore` is called in place of `init`, on
an environment that was made for the same task. Others are copied by `copy.deepcopy`, unless they have a `close` of
their own: what has to be closed is outside of the object, and its copy would act on the same world.
"""

from __future__ import annotations

import copy
from typing import Any

from msgspec import Struct

BASE_CLOSE = "Env.close"
"""The method of the base class, ours and skyrl_gym's, which closes nothing."""


class NotCopyable(Exception):
    """An environment cannot be copied; the message says why."""


class WorldSnapshot(Struct, frozen=True):
    """The state of an environment before a turn."""

    data: bytes | None
    """What its own `snapshot` returned."""
    twin: Any = None
    """A copy of the environment, which is never played itself."""


def check_copyable(env: object, name: str) -> None:
    """Raises NotCopyable for an environment without a `snapshot` whose copy would not be a copy of its world."""
    close = getattr(type(env), "close", None)
    if hasattr(env, "close_async") or (close is not None and close.__qualname__ != BASE_CLOSE):
        raise NotCopyable(
            f"{name} has a close of its own, so its world may be outside of the object; "
            "give it snapshot() -> bytes and restore(data)"
        )


def copied(env: Any) -> Any:
    return copy.deepcopy(env)
