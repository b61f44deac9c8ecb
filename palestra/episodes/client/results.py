"""Results of players, checked before they are sent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import SupportsFloat, TypedDict, Unpack

from palestra.episodes.client.errors import InvalidResult
from palestra.types.episodes import EpisodeError, EpisodeResult
from palestra.util.json_types import JsonMapping

MAX_MESSAGE = 4000  # characters of an error that are sent: a traceback may contain a whole prompt


class ResultParts(TypedDict, total=False):
    """Optional parts of a result besides its reward."""

    step_rewards: Iterable[SupportsFloat]
    agent_rewards: Mapping[str, SupportsFloat] | None
    is_success: bool | None
    metrics: Mapping[str, SupportsFloat] | None
    metadata: JsonMapping | None
    error: EpisodeError | BaseException | None


def result_of(reward: SupportsFloat | None = None, **parts: Unpack[ResultParts]) -> EpisodeResult:
    is_success, error = parts.get("is_success"), parts.get("error")
    return check_result(
        EpisodeResult(
            reward=None if reward is None else _number(reward, "reward"),
            step_rewards=[
                _number(value, f"step_rewards[{i}]") for i, value in enumerate(parts.get("step_rewards", ()))
            ],
            agent_rewards=_numbers(parts.get("agent_rewards"), "agent_rewards"),
            is_success=None if is_success is None else bool(is_success),
            metrics=_numbers(parts.get("metrics"), "metrics"),
            metadata=dict(parts.get("metadata") or {}),
            error=error_of(error) if isinstance(error, BaseException) else error,
        )
    )


def as_result(result: EpisodeResult | SupportsFloat) -> EpisodeResult:
    return check_result(result) if isinstance(result, EpisodeResult) else result_of(result)


def check_result(result: EpisodeResult) -> EpisodeResult:
    """Checks that all numbers are finite, since JSON has no NaN and no infinity."""
    numbers: list[tuple[str, float | None]] = [("reward", result.reward)]
    numbers += [(f"step_rewards[{i}]", value) for i, value in enumerate(result.step_rewards)]
    numbers += [(f"agent_rewards[{name!r}]", value) for name, value in result.agent_rewards.items()]
    numbers += [(f"metrics[{name!r}]", value) for name, value in result.metrics.items()]
    for name, value in numbers:
        if value is not None and not math.isfinite(value):
            raise InvalidResult(f"{name} is {value}, but it must be a finite number")
    if result.reward is None and not (result.step_rewards or result.agent_rewards or result.error):
        raise InvalidResult("the result has no reward; give reward, step_rewards, agent_rewards or an error")
    return result


def error_of(error: BaseException) -> EpisodeError:
    return EpisodeError(type=type(error).__name__, message=str(error)[:MAX_MESSAGE])


def _number(value: SupportsFloat, name: str) -> float:
    """Converts to a float; numbers of numpy and torch are accepted."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidResult(f"{name} is {value!r:.100}, but it must be a finite number") from None


def _numbers(given: Mapping[str, SupportsFloat] | None, what: str) -> dict[str, float]:
    return {name: _number(value, f"{what}[{name!r}]") for name, value in (given or {}).items()}
