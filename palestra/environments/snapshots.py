"""Copies of an environment in the middle of an episode, from which other episodes go on.

An environment with `snapshot() -> bytes` and `restore(data)` copies itself: `restore` is called in place of `init`, on
an environment that was made for the same task. Others are copied by `copy.deepcopy`, unless they have a `close` of
their own: what has to be closed is outside of the object, and its copy would act on the same world. Then another
environment can be brought into the same state by repeating all turns in it, if it answers each as the first did.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from palestra.types.rollouts import Message

BASE_CLOSE = "Env.close"
"""The method of the base class, ours and skyrl_gym's, which closes nothing."""


class NotCopyable(Exception):
    """An environment cannot be copied; the message says why."""


class WorldSnapshot(Struct, frozen=True):
    """The state of an environment before a turn."""

    data: bytes | None = None
    """What its own `snapshot` returned."""
    twin: Any = None
    """A copy of the environment, which is never played itself."""
    repeated: RepeatedTurns | None = None
    """The turns that lead to it, where it cannot be copied."""


class RepeatedTurns(Struct, frozen=True):
    """What an environment was told so far, and what it answered."""

    prompt: list[Message]
    opening: bytes
    """Digest of the conversation that it began with."""
    turns: tuple[tuple[str, bytes], ...] = ()
    """Each action with the digest of its answer."""


class TurnLog(Struct):
    """Notes the turns of an environment that is played, so that they can be repeated in another one."""

    _prompt: list[Message] = field(default_factory=list)
    _opening: bytes = b""
    _turns: list[tuple[str, bytes]] = field(default_factory=list)

    def begin(self, prompt: list[Message], conversation: Sequence[Message]) -> None:
        self._prompt, self._opening = prompt, digest(conversation)

    def add(self, action: str, answer: bytes) -> None:
        self._turns.append((action, answer))

    @property
    def repeated(self) -> RepeatedTurns:
        return RepeatedTurns(self._prompt, self._opening, tuple(self._turns))


def check_copyable(env: object, name: str) -> None:
    """Raises NotCopyable for an environment without a `snapshot` whose copy would not be a copy of its world."""
    close = getattr(type(env), "close", None)
    if hasattr(env, "close_async") or (close is not None and close.__qualname__ != BASE_CLOSE):
        raise NotCopyable(
            f"{name} has a close of its own, so its world may be outside of the object; "
            "give it snapshot() -> bytes and restore(data), or repeat its turns in a new one (rollout.branch.replay)"
        )


def copied(env: Any) -> Any:
    return copy.deepcopy(env)


def digest(answer: object) -> bytes:
    return hashlib.sha256(msgspec.json.encode(answer)).digest()
