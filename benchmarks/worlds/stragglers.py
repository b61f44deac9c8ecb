"""Answers of one length, and every 32nd of ten times as many tokens: a puppet says them word by word."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

from palestra.environments import BaseTextEnv
from palestra.testing.puppet import Cue, make_puppet
from palestra.util.json_types import JsonObject

TOKENS, FACTOR, ONE_IN = 60, 10, 32
BRIEFLY, AT_LENGTH = "Briefly.", "At length."


def make_model(folder: Path) -> Path:
    """A model whose answers have these lengths; weights that are hardly trained do not change them."""
    lengths = ((BRIEFLY, TOKENS), (AT_LENGTH, TOKENS * FACTOR))
    script = [Cue(when=cue, say=" ".join(f"{cue[0]}{n:04d}" for n in range(length))) for cue, length in lengths]
    return make_puppet(folder, script, context=2 * TOKENS * FACTOR)


class Stragglers(BaseTextEnv):
    """Which rollout is slow depends on how many were begun before it: whoever plays has as many of them."""

    begun = itertools.count()
    max_turns = 1

    @staticmethod
    def tasks(split: str) -> list[JsonObject]:
        return [{"id": str(number), "prompt": "Speak."} for number in range(2000)]

    def init(self, prompt: Any) -> tuple[Any, JsonObject]:
        number = next(self.begun)
        cue = AT_LENGTH if number % ONE_IN == ONE_IN // 2 else BRIEFLY
        self._reward = random.Random(number).random()
        return [{"role": "user", "content": cue}], {}

    def step(self, action: str) -> Any:
        self.turns += 1
        return {"observations": [], "reward": self._reward, "done": True, "metadata": {}}
