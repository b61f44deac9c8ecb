"""Agents that call a tool in each turn: three turns, and every 32nd rollout ten times as many."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

from palestra.environments import BaseTextEnv
from palestra.testing.puppet import Cue, make_puppet
from palestra.util.json_types import JsonObject

TURNS, FACTOR, ONE_IN = 3, 10, 32
TOKENS = 20
"""Of each turn, without the one that ends it."""
CUE = "Go on."


def make_model(folder: Path, context: int) -> Path:
    """A model whose turns have that length; weights that are hardly trained do not change it."""
    return make_puppet(folder, [Cue(when=CUE, say=" ".join(f"w{n:03d}" for n in range(TOKENS)))], context=context)


class Stragglers(BaseTextEnv):
    """Which rollout is slow depends on how many were begun before it: whoever plays has as many of them."""

    begun = itertools.count()
    tool_s = 0.0
    max_turns = TURNS * FACTOR

    def __init__(self, env_config: object = None, extras: Any = None) -> None:
        super().__init__(env_config, extras)
        number = next(self.begun)
        self._length = TURNS * (FACTOR if number % ONE_IN == ONE_IN // 2 else 1)
        self._reward = random.Random(number).random()

    @staticmethod
    def tasks(split: str) -> list[JsonObject]:
        return [{"id": str(number), "prompt": CUE} for number in range(2000)]

    async def step_async(self, action: str) -> Any:
        self.turns += 1
        await asyncio.sleep(self.tool_s)
        if self.turns == self._length:
            return {"observations": [], "reward": self._reward, "done": True, "metadata": {}}
        return {"observations": [{"role": "user", "content": CUE}], "reward": 0.0, "done": False, "metadata": {}}
