"""The environment `drawings`: a picture that is drawn for the task, and a question about it that is answered by a word
or a number.

Only the picture tells the answer. With `other_picture` each task shows another task's: a control, in which no policy is
better than chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from palestra.chat.tool_calls import without_thinking
from palestra.environments.bundled.drawings.scenes import KINDS, draw
from palestra.environments.pictures import image_part
from palestra.environments.tasks import LazyTasks
from palestra.environments.text import BaseTextEnv, BaseTextEnvStepOutput
from palestra.types.rollouts import Task
from palestra.util.json_types import JsonMapping, JsonObject, JsonPayload
from palestra.util.suggest import did_you_mean

Split = Literal["train", "eval"]

SIZES: dict[Split, int] = {"train": 10_000, "eval": 400}
"""Number of tasks."""
LARGEST_SCALE = 32


class DrawingSettings:
    """`env_config` of the environment."""

    def __init__(self, given: Any = None) -> None:
        config: JsonMapping = given or {}
        self.kinds: Sequence[str] = list(config.get("kinds") or KINDS)
        self.scale = config.get("scale", 1)
        """Pixels of a unit; a picture has 64 units on each side."""
        self.other_picture = bool(config.get("other_picture"))
        for kind in self.kinds:
            if kind not in KINDS:
                raise ValueError(f"drawings: unknown kind {kind!r}; {did_you_mean(kind, list(KINDS))}")
        if not isinstance(self.scale, int) or not 1 <= self.scale <= LARGEST_SCALE:
            raise ValueError(f"drawings: scale should be a whole number from 1 to {LARGEST_SCALE}")


def tasks(split: Split, env_config: Any = None) -> LazyTasks[int]:
    """Returns 10,000 tasks to train on or 400 held-out ones, of each kind by turns."""
    settings = DrawingSettings(env_config)
    kinds = settings.kinds
    return LazyTasks(range(SIZES[split]), lambda at: task(kinds[at % len(kinds)], split, at // len(kinds), settings))


def task(kind: str, split: Split, number: int, settings: DrawingSettings) -> Task:
    scene = draw(kind, split, number, settings.scale)
    shown = draw(kind, split, number + SIZES[split], settings.scale) if settings.other_picture else scene
    return Task(
        id=f"{kind}-{split}-{number}",
        environment="drawings",
        prompt=[{"role": "user", "content": [image_part(shown.file), {"type": "text", "text": scene.question}]}],
        extras={
            "answer": scene.answer,
            "options": scene.options,
            "difficulty": scene.difficulty,
            "level": kind,
        },
    )


def solve(task: Task) -> str:
    """Returns the answer of a perfect policy."""
    return str(task.extras["answer"])


class Drawings(BaseTextEnv):
    """A single turn: the reward is 1 if the reply is the answer and nothing else, else 0."""

    tasks = staticmethod(tasks)
    gold = staticmethod(solve)
    reward_range = (0.0, 1.0)

    def __init__(self, env_config: Any = None, extras: JsonObject | None = None) -> None:
        super().__init__(env_config, extras)
        if missing := {"answer", "options"} - self.extras.keys():
            raise ValueError(f"drawings: a task needs {min(missing)!r} in its extras")
        self._is_answer = True

    def step(self, action: str) -> BaseTextEnvStepOutput:
        if self.turns:
            raise RuntimeError("drawings: the episode is over after one step")
        self.turns += 1
        reply = without_thinking(action).strip().lower().removesuffix(".")
        self._is_answer = reply in self.extras["options"]
        reward = 1.0 if reply == self.extras["answer"] else 0.0
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})

    def get_metrics(self) -> JsonPayload:
        return {"parse_error": 0.0 if self._is_answer else 1.0}
