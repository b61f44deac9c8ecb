"""What a contender of `time_to_reward` is asked to train, and how it reports.

A contender is a program: it reads one job from its standard input, trains, and prints a line of JSON whenever weights
are saved. It goes on when it reads an answer.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, json

from palestra.environments import TaskOrder, spec
from palestra.types.rollouts import Task


class Settings(Struct, frozen=True):
    """The same for all contenders of a task."""

    groups: int = 16
    """Prompts of a step."""
    samples: int = 8
    """Rollouts of each prompt."""
    rank: int = 16
    max_tokens: int = 64
    """Most tokens of one turn."""
    max_context: int = 256
    """Most tokens of a whole rollout; no episode of these tasks gets that long."""


SETTINGS = {"arithmetic": Settings(), "stockroom": Settings(max_tokens=48, max_context=640)}
"""Those of the configs that ship."""
ALPHA = 32
BETAS = (0.9, 0.95)
EPSILON = 1e-8
GRAD_CLIP = 1.0


class Job(Struct, frozen=True, kw_only=True):
    task: str
    model: str
    """A folder."""
    device: str
    lr: float
    seed: int
    steps: int
    every: int
    """Steps between two reports."""
    folder: str
    """A new folder for whatever the contender writes."""
    micro_batch: int
    """Rollouts of one forward and backward pass, for contenders that pad."""
    overrides: tuple[str, ...] = ()
    """More settings, for ours."""
    is_shipped: bool = False
    """Begin with the config that ships for this task, with its own learning rate and number of steps."""

    @property
    def settings(self) -> Settings:
        return SETTINGS[self.task]

    def tasks(self) -> Sequence[Task]:
        """The tasks of all steps, in order, the same for all contenders."""
        environment: Any = spec(self.task).load()
        order = TaskOrder([(1.0, environment.tasks("train"))], self.seed)
        return [order[place] for place in range(self.steps * self.settings.groups)]


class Saved(Struct, frozen=True, kw_only=True):
    """Weights that can be evaluated, and what it took to get there."""

    step: int
    adapter: str
    """A folder that PEFT can read."""
    start_s: float
    """Seconds from the start of the program until it was ready for the first step."""
    train_s: float
    """Seconds of all steps so far, without evaluations."""
    sampled: int
    """Tokens that the policy sampled."""
    trained: int
    """Tokens of the rows that went through a training pass."""
    reward: float
    """Mean reward of the last step's rollouts."""


class Answer(Struct, frozen=True):
    go_on: bool


class Reporter:
    """The contender's end of the pipe, with a clock that stands still while the other end evaluates."""

    def __init__(self, out: int) -> None:
        self._out = os.fdopen(out, "wb", buffering=0)
        self._begin: float | None = None
        self._start_s = 0.0

    @classmethod
    def open(cls) -> tuple[Job, Reporter]:
        """Takes standard output for the reports; whatever else the program prints goes to its log."""
        out = os.dup(1)
        os.dup2(2, 1)
        return json.decode(sys.stdin.buffer.readline(), type=Job), cls(out)

    def begin(self) -> None:
        """The first step begins; further calls change nothing."""
        if self._begin is None:
            self._begin, self._start_s = time.monotonic(), _age_s()

    def report(self, step: int, adapter: Path, *, paused_at: float, sampled: int, trained: int, reward: float) -> bool:
        """Returns whether to go on. The clock stands still from `paused_at` until the answer has come."""
        assert self._begin is not None
        saved = Saved(
            step=step,
            adapter=str(adapter),
            start_s=self._start_s,
            train_s=paused_at - self._begin,
            sampled=sampled,
            trained=trained,
            reward=reward,
        )
        self._out.write(json.encode(saved) + b"\n")
        line = sys.stdin.buffer.readline()
        self._begin += time.monotonic() - paused_at
        return bool(line) and json.decode(line, type=Answer).go_on


def _age_s() -> float:
    """Seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
