"""A scripted player of a given skill, by which the difficulty of tasks is measured.

It plays a task's own solution. Each call is right with the probability `skill`; where it is not, the player makes a
call by chance in its place and takes up the next sub-goal. So a task is as difficult as its calls are many.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TypedDict

import msgspec

from palestra.environments.platform.attackers import random_call
from palestra.environments.platform.errors import PlatformError
from palestra.environments.platform.golden import ANSWER_TOOL, play_golden
from palestra.environments.platform.instance import Instance
from palestra.environments.platform.task_records import PlatformTask, TaskKey
from palestra.environments.platform.task_templates import Solution
from palestra.environments.platform.tasks import make_task
from palestra.environments.platform.verdicts import verify
from palestra.util.json_types import JsonObject


class MeasuredDifficulty(msgspec.Struct, frozen=True, kw_only=True):
    """What a scripted player made of tasks."""

    skill: float
    """Share of its calls that are right."""
    episodes: int
    success: float
    """Share of episodes that solved their task."""
    progress: float
    """Mean share of sub-goals that were met, less one for each change that the task does not ask for."""


def gold_calls(task: PlatformTask) -> tuple[int, int]:
    """Returns how many calls the task's solution has, and how many of them write, which is the fewest possible."""
    with contextlib.closing(Instance(task.seed, variables=task.variables)) as instance:
        steps = play_golden(task, instance).steps
    worked = [call.tool for call, result in steps if not result.is_error]
    return len(worked), sum(tool.writes for name in worked if (tool := task.app.tool(name)))


def play_with_skill(task: PlatformTask, instance: Instance, skill: float, rng: random.Random) -> str | None:
    """Plays a task and returns the answer that it gives."""
    goals = task.template.goals
    answer: str | None = None
    for solving in goals.solve(task.params) if goals else [task.template.solve(task.params)]:
        # what a slip has changed may leave the rest of a solution without what it looks for
        with contextlib.suppress(PlatformError, LookupError, ValueError, RuntimeError):
            answer = _play(solving, task, instance, skill, rng) or answer
    return answer


def _play(solving: Solution, task: PlatformTask, instance: Instance, skill: float, rng: random.Random) -> str | None:
    call = next(solving, None)
    while call is not None:
        if rng.random() >= skill:
            random_call(rng, task, instance, task.app.tools)
            return None
        if call.tool == ANSWER_TOOL:
            return call.arguments["answer"]
        result = instance.call(call.tool, call.arguments)
        if result.is_error:
            result = instance.call(call.tool, call.arguments)
        try:
            call = solving.send(msgspec.json.decode(result.text))
        except StopIteration:
            return None
    return None


def measure(tasks: list[PlatformTask], skill: float, episodes: int) -> MeasuredDifficulty:
    """Plays each task so many times."""
    scores: list[float] = []
    progress: list[float] = []
    for task in tasks:
        for number in range(episodes):
            with contextlib.closing(Instance(task.seed, variables=task.variables)) as instance:
                rng = random.Random(f"{task.key}/{skill}/{number}")
                verdict = verify(task, instance, play_with_skill(task, instance, skill, rng))
            score = verdict.score or 0.0
            scores.append(score)
            progress.append(score if verdict.progress is None else verdict.progress)
    count = len(scores)
    return MeasuredDifficulty(skill=skill, episodes=count, success=sum(scores) / count, progress=sum(progress) / count)


class TemplateDifficulty(TypedDict):
    """How long the solutions of a template are, and what players made of it."""

    template: str
    tasks: int
    calls: float
    writes: float
    skills: list[JsonObject]
    """A `MeasuredDifficulty` for each skill."""


EPISODES = 20
"""Episodes of each task at each skill."""


def measure_templates(keys: Iterable[TaskKey], skills: Sequence[float]) -> list[TemplateDifficulty]:
    """Returns, for each template of these tasks, the mean length of their solutions and what players of these skills
    made of them."""
    rows: list[TemplateDifficulty] = []
    for (app, template), own in groupby(keys, key=lambda key: (key.app, key.template)):
        tasks = [make_task(key) for key in own]
        lengths = [gold_calls(task) for task in tasks]
        rows.append(
            {
                "template": f"{app}-{template}",
                "tasks": len(tasks),
                "calls": sum(calls for calls, _ in lengths) / len(tasks),
                "writes": sum(writes for _, writes in lengths) / len(tasks),
                "skills": [msgspec.to_builtins(measure(tasks, skill, EPISODES)) for skill in skills],
            }
        )
    return rows
