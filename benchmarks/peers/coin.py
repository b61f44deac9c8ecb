"""An environment whose reward is a coin: every step of a random model has something to learn from."""

from __future__ import annotations

import zlib

from palestra.environments import BaseTextEnv, BaseTextEnvStepOutput


class Coin(BaseTextEnv):
    max_turns = 1

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = float(zlib.crc32(action.encode(errors="replace")) % 2)
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})

    @staticmethod
    def tasks(split: str) -> list[dict]:
        return [{"id": f"{split}-{n}", "prompt": f"Task {n}: " + "say something. " * 20} for n in range(256)]
