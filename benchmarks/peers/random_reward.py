"""An environment whose reward is drawn from the answer's hash: a random model has something to learn in every group."""

from __future__ import annotations

import zlib

from palestra.environments import BaseTextEnv, BaseTextEnvStepOutput


class RandomReward(BaseTextEnv):
    max_turns = 1

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = zlib.crc32(action.encode(errors="replace")) / 2**32
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})

    @staticmethod
    def tasks(split: str) -> list[dict]:
        return [{"id": f"{split}-{n}", "prompt": f"Task {n}: " + "say something. " * 20} for n in range(256)]
