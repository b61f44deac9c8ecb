"""An environment that shows pictures, for tests: one in its first message, and one after each answer."""

from __future__ import annotations

from typing import Any

from palestra.environments import BaseTextEnv, BaseTextEnvStepOutput, image_part
from palestra.environments.tasks import LazyTasks
from palestra.types.rollouts import Task
from tests.pictures import drawn, file_of

NAME = "tests.training.shown:ShownEnv"
GIVEN = "tests.training.shown:GivenEnv"


def tasks(split: str) -> LazyTasks[int]:
    return LazyTasks(
        range(100 if split == "eval" else 0, 104),
        lambda n: Task(id=str(n), environment="shown", prompt=[], extras={"n": n}),
    )


class ShownEnv(BaseTextEnv):
    """Rewards long answers, so that rewards differ."""

    tasks = staticmethod(tasks)
    max_turns = 2

    def init(self, prompt: Any) -> tuple[Any, dict[str, Any]]:
        parts = [{"type": "text", "text": "Look: "}, image_part(drawn(self.extras["n"])), {"type": "text", "text": "?"}]
        return [{"role": "user", "content": parts}], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        picture = image_part(file_of(drawn(1000 + self.extras["n"], 32, 32), "JPEG"))
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": [picture]}],
            reward=float(len(action) % 3),
            done=self.turns == self.max_turns,
            metadata={},
        )


class GivenEnv(BaseTextEnv):
    """Shows the pictures of its tasks' prompts, and rewards long answers."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=float(len(action) % 3), done=True, metadata={})
