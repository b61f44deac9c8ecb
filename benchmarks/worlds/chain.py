"""Chains of twelve decisions with one reward at the end: the worlds of `benchmarks/credit.py`.

At each of twelve doors the policy says the door's letter and 0 or 1. Which number is right at which door never changes,
so that all there is to learn is which of the decisions the reward is due to. The letter is said because a decision can
only depend on what its position sees: a small random model does not see the observation through its chat template, and
the token before it always. Anything but the door's letter and a number is wrong.
"""

from __future__ import annotations

import random
from typing import Any

from palestra.environments import BaseTextEnv
from palestra.util.json_types import JsonObject

DOORS = "ABCDEFGHIJKL"
RIGHT = "011010011001"
LOCKED = (2, 6, 10)
"""The doors that count in `Locks`."""
TASKS = 64
PROMPT = "There are 12 doors, A to L. At each, say its letter and 0 or 1. Door A."


class Chain(BaseTextEnv):
    """The reward is the share of doors at which the right number was said; it comes after the last."""

    max_turns = len(DOORS)
    reward_range = (0.0, 1.0)

    def __init__(self, env_config: Any = None, extras: JsonObject | None = None) -> None:
        super().__init__(env_config, extras)
        self._right: list[bool] = []

    async def step_async(self, action: str) -> Any:  # no thread for what takes no time
        door = self.turns
        self._right.append(action.strip() == DOORS[door] + RIGHT[door])
        self.turns += 1
        is_over = self._is_over()
        observations = [] if is_over else [{"role": "user", "content": f"Door {DOORS[self.turns]}."}]
        return {"observations": observations, "reward": self._reward(is_over), "done": is_over, "metadata": {}}

    def _is_over(self) -> bool:
        return self.turns == len(DOORS)

    def _reward(self, is_over: bool) -> float:
        return sum(self._right) / len(DOORS) if is_over else 0.0

    @staticmethod
    def tasks(split: str) -> list[JsonObject]:
        return [{"id": f"{split}-{number}", "prompt": [{"role": "user", "content": PROMPT}]} for number in range(TASKS)]


class TurnRewardChain(Chain):
    """The same sum, but each turn has the reward of its own door."""

    def _reward(self, is_over: bool) -> float:
        return self._right[-1] / len(DOORS)


class Corridor(Chain):
    """The first wrong number ends it; the reward is the share of doors that were passed."""

    def _is_over(self) -> bool:
        return super()._is_over() or not self._right[-1]


class Locks(Chain):
    """Three of the twelve doors count. The reward is 1 if the right number was said at all three, else 0."""

    def _reward(self, is_over: bool) -> float:
        return float(is_over and all(self._right[door] for door in LOCKED))


def answers(count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Conversations in which a coin answers: whoever imitates them knows the form and nothing else."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        messages = [{"role": "user", "content": PROMPT}]
        for place, door in enumerate(DOORS):
            messages.append({"role": "assistant", "content": door + draw.choice("01")})
            if place + 1 < len(DOORS):
                messages.append({"role": "user", "content": f"Door {DOORS[place + 1]}."})
        found.append(messages)
    return found
