from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from palestra.config.environment_entries import EnvironmentEntry
from palestra.environments import EnvironmentSet

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_example_of_the_guide_is_won_by_halving(monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", list(sys.path))

    async def episode(envs, task):
        session = envs.open(task)
        await session.init(task.prompt)
        low, high = 1, 100
        while True:
            guess = (low + high) // 2
            result = await session.step(str(guess))
            if result.done:
                return result.reward
            low, high = (guess + 1, high) if result.observations[0]["content"] == "higher" else (low, guess - 1)

    async def episodes(envs):
        return [await episode(envs, task) for split in ("train", "eval") for task in envs.tasks(split)[0].tasks]

    entry = EnvironmentEntry(name="my_environment:Guess")
    with EnvironmentSet([entry], env_threads=2, env_timeout_s=10) as envs:
        assert asyncio.run(episodes(envs)) == [1.0] * 100
