"""The outcome of a rollout that verifiers has played."""

from __future__ import annotations

import math
from typing import Any

from msgspec import Struct

from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.types.rollouts import Message, RolloutStop, Task
from palestra.util.json_types import JsonObject


class OutcomeError(Struct, frozen=True):
    type: str
    message: str


class VerifiersOutcome(Struct, frozen=True, kw_only=True):
    reward: float | None = None
    """None if several agents have rewards of their own."""
    agents: dict[str, float] | None = None
    """Rewards of the agents that are trained; None: there is one agent, without a name."""
    rewards: dict[str, float] = {}
    """Rewards before their weights, by their names."""
    metrics: dict[str, Any] = {}
    messages: list[Message] = []
    stop: str = ""
    is_cut: bool = False
    read: int = 0
    """Tokens of the prompts of its model calls."""
    sampled: int = 0
    error: OutcomeError | None = None

    @property
    def numbers(self) -> dict[str, float]:
        named = {**{f"reward/{name}": value for name, value in self.rewards.items()}, **self.metrics}
        found = {name: float(value) for name, value in named.items() if isinstance(value, int | float)}
        return {name: value for name, value in found.items() if math.isfinite(value)}

    @property
    def verdict(self) -> JsonObject:
        return {"stop": self.stop, **({"rewards": self.rewards} if self.rewards else {})}

    @property
    def ending(self) -> RolloutStop:
        return RolloutStop.LENGTH if self.is_cut else RolloutStop.DONE

    @property
    def problem(self) -> OutcomeError | None:
        """The reason why there is no reward, if there is none."""
        values = [self.reward] if self.reward is not None else [*(self.agents or {}).values()]
        if self.error is not None:
            return self.error
        if not values or not all(math.isfinite(value) for value in values):
            return OutcomeError("NoReward", "verifiers has given no reward, or one that is not finite")
        return None


def request_of(task: Task, settings: RolloutSettings, base_url: str, model: str) -> JsonObject:
    """Returns the parameters of `play` at the host, but for the attempts."""
    sampling: JsonObject = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_tokens": settings.max_tokens,
        **({"top_k": settings.top_k} if settings.top_k >= 0 else {}),  # not all endpoints know it
    }
    place = {name: task.extras[name] for name in ("part", "split", "index")}
    return {**place, "base_url": base_url, "model": model, "sampling": sampling}


def attempt_of(api_key: str | None, seed: int) -> JsonObject:
    return {"api_key": api_key or "none", "seed": seed % 2**31}
