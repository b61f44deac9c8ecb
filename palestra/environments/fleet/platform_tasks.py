"""Tasks of the local platform as Fleet tasks: made from their keys, or written to a tasks_file with their verifiers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl

import msgspec

from palestra.environments.fleet.records import FleetTask
from palestra.environments.platform import (
    Instance,
    PlatformError,
    PlatformTask,
    TaskApp,
    TaskKey,
    TaskTemplate,
    make_task,
)
from palestra.environments.platform.catalog import chosen_templates
from palestra.environments.platform.golden import ANSWER_TOOL, play_golden
from palestra.environments.platform.task_records import FIRST_EVAL, DifficultyKnob, knobs_of
from palestra.environments.platform.verifiers.source import verifier_source
from palestra.environments.tasks import LazyTasks
from palestra.types.rollouts import Task
from palestra.util.json_types import JsonPayload

PLATFORM = "platform:"
SHOWN_KEYS = 5
MAX_KEPT = 4096  # tasks: a group's rollouts share one
MAX_COUNT = 1_000_000  # of one choice
CHOICES = ("difficulty", "template", "count", "first", "knobs")

Split = Literal["train", "eval"]


class PlatformTasks(msgspec.Struct, frozen=True):
    """A selection of tasks, as its name says: `platform:keys?difficulty=0b,0c&count=200`."""

    name: str
    app: str | None
    """None: any app."""
    difficulties: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    count: int = 1000
    first: int = 0
    """The first number within a split."""
    knobs: tuple[DifficultyKnob, ...] = ()

    @classmethod
    def parse(cls, name: str) -> PlatformTasks:
        """Parses a name. Raises ValueError."""
        app, _, query = name.removeprefix(PLATFORM).partition("?")
        given = dict(parse_qsl(query, keep_blank_values=True))
        unknown = given.keys() - set(CHOICES)
        if unknown:
            raise ValueError(f"{name}: unknown setting {min(unknown)!r}; there are {', '.join(CHOICES)}")
        numbers = {key: _number(name, key, given[key]) for key in ("count", "first") if key in given}
        found = cls(
            name,
            app or None,
            tuple(given["difficulty"].split(",")) if "difficulty" in given else (),
            tuple(given["template"].split(",")) if "template" in given else (),
            knobs=_knobs(name, given["knobs"]) if "knobs" in given else (),
            **numbers,
        )
        found._check()
        return found

    def find(self, task_key: str) -> FleetTask:
        """Returns a task by its key: any task of the app, even outside of this selection. Raises ValueError."""
        try:
            task = platform_task(task_key)
        except PlatformError as e:
            raise ValueError(f"task_key {task_key!r} is not in {self.name}: {e}; it has {self._some()}") from None
        if self.app is not None and task.app.key != self.app:
            raise ValueError(f"task_key {task_key!r} is not in {self.name}; it has {self._some()}")
        return fleet_task(task)

    def keys(self, split: Split) -> Sequence[TaskKey]:
        """Returns keys; templates take turns."""
        chosen = self._chosen()
        start = self.first + (FIRST_EVAL if split == "eval" else 0)
        return [
            TaskKey(app.key, template.name, template.difficulty, start + place // len(chosen), self.knobs)
            for place in range(self.count)
            for app, template in [chosen[place % len(chosen)]]
        ]

    def tasks(self, split: Split) -> Sequence[Task]:
        """Returns tasks for a training run; each is made when it is accessed."""
        return LazyTasks(self.keys(split), partial(_task, self.name))

    def _chosen(self) -> list[tuple[TaskApp, TaskTemplate]]:
        return chosen_templates([self.app] if self.app else [], self.templates, self.difficulties)

    def _check(self) -> None:
        try:
            chosen = self._chosen()
        except PlatformError as e:
            raise ValueError(f"{self.name}: {e}") from None
        if not chosen:
            everything = msgspec.structs.replace(self, difficulties=(), templates=())._chosen()
            has = ", ".join(f"{template.name} ({template.difficulty})" for _, template in everything)
            raise ValueError(f"{self.name}: no template matches; there are {has}")
        if not 0 < self.count <= MAX_COUNT or self.first + self.count > FIRST_EVAL:
            raise ValueError(f"{self.name}: count must be 1 to {MAX_COUNT}, and first + count at most {FIRST_EVAL}")

    def _some(self) -> str:
        return ", ".join(map(str, self.keys("train")[:SHOWN_KEYS])) + ", …"


@lru_cache(maxsize=MAX_KEPT)
def platform_task(task_key: str) -> PlatformTask:
    """Returns the platform's task. Raises PlatformError."""
    return make_task(task_key)


def gold_messages(task_key: str) -> list[str]:
    """Returns what a policy that plays the task's own solution says: a call in each message, then its answer or
    `<done>`. Raises PlatformError."""
    task = platform_task(task_key)
    instance = Instance(task.seed, variables=task.variables)
    try:
        played = play_golden(task, instance)
    finally:
        instance.close()
    turns = [_call_text(call.tool, call.arguments) for call, _ in played.steps]
    return [*turns, "<done>" if played.answer is None else _call_text(ANSWER_TOOL, {"answer": played.answer})]


def _call_text(tool: str, arguments: JsonPayload) -> str:
    named = {"name": tool, "arguments": arguments}
    return f"<tool_call>{json.dumps(named, ensure_ascii=False)}</tool_call>"


def fleet_task(task: PlatformTask) -> FleetTask:
    return FleetTask(
        task_key=str(task.key),
        prompt=task.prompt,
        env_key=task.app.key,
        env_version=task.app.version,
        data_key=task.seed.key,
        data_version=task.app.version,
        env_variables=dict(task.variables),
        max_turns=task.template.max_turns,
    )


def _task(tasks_file: str, key: TaskKey) -> Task:
    task = platform_task(str(key))
    return Task(
        id=str(key),
        environment="fleet_task",
        prompt=[{"role": "user", "content": task.prompt}],
        extras={
            "task_key": str(key),
            "data_source": task.app.key,
            "level": f"{task.app.key}-{task.template.difficulty}",
            "tasks_file": tasks_file,
        },
    )


def _knobs(name: str, text: str) -> tuple[DifficultyKnob, ...]:
    try:
        return knobs_of(text.split(","))
    except PlatformError as e:
        raise ValueError(f"{name}: {e}") from None


def _number(name: str, key: str, text: str) -> int:
    if not text.isdecimal() or len(text) > 10:
        raise ValueError(f"{name}: {key} must be a whole number, found {text!r}")
    return int(text)


def export_tasks(keys: Iterable[TaskKey | str], file: Path) -> int:
    """Writes tasks and returns their number."""
    rows = [fleet_row(make_task(key)) for key in keys]
    file.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
    return len(rows)


def fleet_row(task: PlatformTask) -> JsonPayload:
    """Returns a row in the spelling of Fleet's own exports and in that of OpenEnv: Fleet's `FleetTaskEnv` reads
    `data_key` only."""
    key, app, data = str(task.key), task.app, task.seed.key
    return {
        "key": key,
        "task_key": key,
        "prompt": task.prompt,
        "env_id": app.key,
        "env_key": app.key,
        "version": app.version,
        "env_version": app.version,
        "data_id": data,
        "data_key": data,
        "data_version": app.version,
        "verifier_func": verifier_source(task),
        "task_modality": "tool_use",
        "env_variables": dict(task.variables),
        "difficulty": _level(task.template.difficulty),
        "max_turns": task.template.max_turns,
        "metadata": {"template": task.template.name, "difficulty": task.template.difficulty, "params": task.params},
    }


def _level(difficulty: str) -> int:
    """Returns Fleet's level: 1 easy, 2 medium, 3 hard."""
    return max(1, int(difficulty[0]))
