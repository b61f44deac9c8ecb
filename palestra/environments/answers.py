"""What an environment may answer, and nothing else.

Owns: checking shapes and numbers, copying what an environment might change later. Never touches: the environment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct, field

from palestra.environments.errors import EnvironmentFailure
from palestra.types.rollouts import Message

SHOWN_CHARS = 80  # of a value in a message


class StepResult(Struct, kw_only=True):
    observations: list[Message]
    reward: float | None
    """None: the environment could not grade it."""
    done: bool
    metadata: dict[str, Any] = field(default_factory=dict)
    """Also holds `postprocessed_action`, where the environment wants the action to read differently."""


def conversation_of(answer: Any) -> list[Message]:
    """From `init`: (messages, metadata)."""
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise EnvironmentFailure(f"init should answer (messages, metadata), not {shown(answer)}")
    conversation = _messages(answer[0], "init")
    if not conversation:
        raise EnvironmentFailure("init answered a conversation without messages")
    return conversation


def step_result_of(answer: Any) -> StepResult:
    """From `step`: a BaseTextEnvStepOutput."""
    if not isinstance(answer, Mapping):
        raise EnvironmentFailure(f"step should answer a dict with observations, reward and done, not {shown(answer)}")
    if missing := {"reward", "done"} - answer.keys():
        raise EnvironmentFailure(f"step answered a dict without {min(missing)!r}: {shown(dict(answer))}")
    metadata = answer.get("metadata") or {}
    if not isinstance(metadata, Mapping):
        raise EnvironmentFailure(f"step answered metadata that is no dict: {shown(metadata)}")
    rewritten = answer.get("postprocessed_action")
    return StepResult(
        observations=_messages(answer.get("observations") or [], "step"),
        reward=_reward(answer["reward"]),
        done=_flag(answer["done"]),
        metadata=dict(metadata) if rewritten is None else {**metadata, "postprocessed_action": rewritten},
    )


def numbers_of(answer: Any) -> dict[str, float]:
    """From `get_metrics`: the finite numbers, booleans as 0 and 1."""
    if not isinstance(answer, Mapping):
        return {}
    numbers = {str(key): _number(value) for key, value in answer.items()}
    return {key: number for key, number in numbers.items() if number is not None and math.isfinite(number)}


def shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"


def _messages(found: Any, where: str) -> list[Message]:
    if isinstance(found, str | bytes | Mapping) or not isinstance(found, Iterable):
        raise EnvironmentFailure(f"{where} should answer a list of messages, not {shown(found)}")
    messages = list(found)
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise EnvironmentFailure(f"{where} answered a message without role and content: {shown(message)}")
    return [dict(message) for message in messages]


def _reward(found: Any) -> float | None:
    if found is None:
        return None
    reward = _number(found)
    if reward is None or not math.isfinite(reward):
        raise EnvironmentFailure(f"step answered a reward that is no finite number: {shown(found)}")
    return reward


def _flag(found: Any) -> bool:
    try:
        is_flag = found in (True, False)
    except Exception:  # an array has no truth of its own
        is_flag = False
    if not is_flag:
        raise EnvironmentFailure(f"step answered done that is neither True nor False: {shown(found)}")
    return bool(found)


def _number(found: Any) -> float | None:
    """Also numpy's and torch's scalars, by what they can do; text that looks like a number is none."""
    if isinstance(found, str | bytes) or not (hasattr(found, "__float__") or hasattr(found, "__index__")):
        return None
    try:
        return float(found)
    except Exception:
        return None
