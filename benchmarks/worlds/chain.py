"""A chain of twelve decisions with one reward at the end: the world of `benchmarks/credit.py`.

At each of twelve doors the policy says A or B. Nothing tells whether that was right; after the last door the reward is
the share of doors at which it was. Which word is right at which door never changes, so that all there is to learn is
which of twelve decisions the reward is due to. Anything but A or B is wrong.
"""

from __future__ import annotations

import random
from typing import Any

from palestra.environments import BaseTextEnv
from palestra.util.json_types import JsonObject

RIGHT = "ABBABAABBAAB"
WORDS = ("A", "B")
TASKS = 64
PROMPT = "There are 12 doors. Say A or B at each. Door 1."


class Chain(BaseTextEnv):
    max_turns = len(RIGHT)
    reward_range = (0.0, 1.0)

    def __init__(self, env_config: Any = None, extras: JsonObject | None = None) -> None:
        super().__init__(env_config, extras)
        self._right = 0

    async def step_async(self, action: str) -> Any:  # no thread for what takes no time
        self._right += action.strip() == RIGHT[self.turns]
        self.turns += 1
        is_over = self.turns == len(RIGHT)
        observations = [] if is_over else [{"role": "user", "content": f"Door {self.turns + 1}."}]
        reward = self._right / len(RIGHT) if is_over else 0.0
        return {"observations": observations, "reward": reward, "done": is_over, "metadata": {}}

    @staticmethod
    def tasks(split: str) -> list[JsonObject]:
        return [{"id": f"{split}-{number}", "prompt": [{"role": "user", "content": PROMPT}]} for number in range(TASKS)]


def answers(count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Conversations in which a coin answers: whoever imitates them knows the form and nothing else."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        messages = [{"role": "user", "content": PROMPT}]
        for door in range(len(RIGHT)):
            messages.append({"role": "assistant", "content": draw.choice(WORDS)})
            if door + 1 < len(RIGHT):
                messages.append({"role": "user", "content": f"Door {door + 2}."})
        found.append(messages)
    return found
