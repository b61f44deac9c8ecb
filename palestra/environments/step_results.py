"""Checks what an environment returns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct, field

from palestra.environments.errors import EnvironmentFailure
from palestra.environments.guarded_calls import error_text
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonObject

SHOWN_CHARS = 80  # of a value in a message
VERDICT_BYTES = 64 << 10  # of a verdict as JSON, which is kept with every rollout


class StepResult(Struct, kw_only=True):
    """The checked result of a step: messages, reward, and whether it is over."""

    observations: list[Message]
    reward: float | None
    """None: the environment could not grade it."""
    done: bool
    metadata: JsonObject = field(default_factory=dict)
    """Also has `postprocessed_action`, if the environment wants the action to read differently."""


def conversation_of(answer: object) -> list[Message]:
    """Checks the result of `init`: (messages, metadata)."""
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise EnvironmentFailure(f"init should return (messages, metadata), not {shown(answer)}")
    conversation = _messages(answer[0], "init")
    if not conversation:
        raise EnvironmentFailure("init returned a conversation without messages")
    return conversation


def step_result_of(answer: object) -> StepResult:
    """Checks the result of `step`: a BaseTextEnvStepOutput."""
    if not isinstance(answer, Mapping):
        raise EnvironmentFailure(f"step should return a dict with observations, reward and done, not {shown(answer)}")
    if missing := {"reward", "done"} - answer.keys():
        raise EnvironmentFailure(f"step returned a dict without {min(missing)!r}: {shown(dict(answer))}")
    metadata = answer.get("metadata") or {}
    if not isinstance(metadata, Mapping):
        raise EnvironmentFailure(f"step returned metadata that is not a dict: {shown(metadata)}")
    rewritten = answer.get("postprocessed_action")
    return StepResult(
        observations=_messages(answer.get("observations") or [], "step"),
        reward=reward_of(answer["reward"]),
        done=_flag(answer["done"]),
        metadata=dict(metadata) if rewritten is None else {**metadata, "postprocessed_action": rewritten},
    )


def numbers_of(answer: object) -> dict[str, float]:
    """Checks the result of `get_metrics`: returns the finite numbers, booleans as 0 and 1."""
    if not isinstance(answer, Mapping):
        return {}
    numbers = {str(key): _number(value) for key, value in answer.items()}
    return {key: number for key, number in numbers.items() if number is not None and math.isfinite(number)}


def verdict_of(answer: object) -> JsonObject:
    """Checks the result of `get_verdict`: returns it as plain JSON, or a note in place of one that is too long. Raises
    TypeError or ValueError for what is no JSON object."""
    if not isinstance(answer, Mapping):
        raise TypeError(f"get_verdict should return a mapping, not {shown(answer)}")
    text = msgspec.json.encode(answer)
    if len(text) > VERDICT_BYTES:
        return {"error": f"the verdict has {len(text)} bytes and is not kept; at most {VERDICT_BYTES} are"}
    return msgspec.json.decode(text)


def shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # boundary: foreign `__repr__`
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"


def _messages(found: object, where: str) -> list[Message]:
    if isinstance(found, str | bytes | Mapping) or not isinstance(found, Iterable):
        raise EnvironmentFailure(f"{where} should return a list of messages, not {shown(found)}")
    try:
        return [_message(message, where) for message in found]
    except EnvironmentFailure:
        raise
    except Exception as error:  # boundary: a generator's own error, or a value that contains itself
        raise EnvironmentFailure(f"{where} returned messages that cannot be read: {error_text(error)}") from error


def _message(found: object, where: str) -> Message:
    if not isinstance(found, Mapping) or not isinstance(found.get("role"), str) or "content" not in found:
        raise EnvironmentFailure(f"{where} returned a message without role and content: {shown(found)}")
    content = found["content"]
    is_parts = isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content)
    if content is not None and not isinstance(content, str) and not is_parts:
        raise EnvironmentFailure(
            f"{where} returned a message whose 'content' is neither text, a list of parts nor None: {shown(content)}"
        )
    return {_key(key, where, ""): _plain(value, where, str(key)) for key, value in found.items()}


def _plain(value: object, where: str, path: str) -> Any:
    """Returns a copy with JSON values at all levels; `path` names its place in an error."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # subclasses become the plain type: enums, and below numpy's float64
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Mapping):
        return {_key(key, where, path): _plain(inner, where, f"{path}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, where, f"{path}[{place}]") for place, inner in enumerate(value)]
    raise EnvironmentFailure(f"{where} returned a message whose {path!r} is not plain JSON data: {shown(value)}")


def _key(key: object, where: str, path: str) -> str:
    if not isinstance(key, str):
        inside = f" in {path!r}" if path else ""
        raise EnvironmentFailure(f"{where} returned a message with a key{inside} that is not text: {shown(key)}")
    return str.__str__(key)


def reward_of(found: object) -> float | None:
    """Returns a finite number, or None."""
    if found is None:
        return None
    reward = _number(found)
    if reward is None or not math.isfinite(reward):
        raise EnvironmentFailure(f"step returned a reward that is not a finite number: {shown(found)}")
    return reward


def _flag(found: object) -> bool:
    try:
        is_flag = found in (True, False)
    except Exception:  # boundary: an array has no truth value
        is_flag = False
    if not is_flag:
        raise EnvironmentFailure(f"step returned a done that is neither True nor False: {shown(found)}")
    return bool(found)


def _number(found: Any) -> float | None:
    """Converts numbers, including scalars of numpy and torch; text is not accepted."""
    if isinstance(found, str | bytes) or not (hasattr(found, "__float__") or hasattr(found, "__index__")):
        return None
    try:
        return float(found)
    except Exception:  # boundary: foreign `__float__`
        return None
