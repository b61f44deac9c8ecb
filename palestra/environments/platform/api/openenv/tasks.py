"""Tasks by split and index, as OpenEnv's Task API and `reset` name them.

The templates of an app take turns: with n of them, index i is number i

n of template i % n.
"""

from __future__ import annotations

import random
from typing import Any, TypedDict

import msgspec

from palestra.environments.platform.api.openenv.wire import ClientMistake, ErrorCode, ResetRequest
from palestra.environments.platform.app import TaskApp
from palestra.environments.platform.errors import PlatformError
from palestra.environments.platform.task_records import FIRST_EVAL, MAX_NUMBER, PlatformTask, TaskKey
from palestra.environments.platform.tasks import make_task
from palestra.util.json_types import JsonPayload

SPLITS = {"train": range(FIRST_EVAL), "eval": range(FIRST_EVAL, MAX_NUMBER)}
TYPES = {"train": "train", "eval": "validation"}
"""OpenEnv knows train, validation and test."""
PER_TEMPLATE = 10  # if all are requested: there are billions
MAX_RANGE = 1000
PATHS = ("tasks", "num_tasks", "task", "task_range")


class TaskEntry(TypedDict):
    """A task in a list."""

    task_key: str
    split: str
    index: int
    prompt: str
    variables: dict[str, str]
    difficulty: str
    max_turns: int


class TaskRange(msgspec.Struct, forbid_unknown_fields=True):
    split: str
    start: int | None = None
    stop: int | None = None


class OneOf(msgspec.Struct, forbid_unknown_fields=True):
    split: str
    index: int


class TaskSplit(msgspec.Struct, forbid_unknown_fields=True):
    split: str


def splits() -> list[dict[str, str]]:
    return [{"name": name, "type": kind} for name, kind in TYPES.items()]


def count(app: TaskApp, split: str) -> int:
    return len(app.templates) * len(_numbers(split))


def key_at(app: TaskApp, split: str, index: int) -> TaskKey:
    if not 0 <= index < count(app, split):
        raise ClientMistake(
            ErrorCode.VALIDATION, f"{app.key} has no task {index} in {split}; it has 0 to {count(app, split) - 1}"
        )
    number, turn = divmod(index, len(app.templates))
    template = app.templates[turn]
    return TaskKey(app.key, template.name, template.difficulty, _numbers(split)[number])


def answer(app: TaskApp, what: str, given: JsonPayload) -> JsonPayload:
    """`what` is the end of the path."""
    match what:
        case "num_tasks":
            return {"num_tasks": count(app, _parsed(given, TaskSplit).split)}
        case "tasks":
            split = _parsed(given, TaskSplit).split
            shown = range(min(count(app, split), PER_TEMPLATE * len(app.templates)))
            return {"tasks": [_task_entry(app, split, index) for index in shown], "env_name": app.key}
        case "task":
            one = _parsed(given, OneOf)
            return {"task": _task_entry(app, one.split, one.index)}
        case _:
            request = _parsed(given, TaskRange)
            start, stop = request.start or 0, count(app, request.split) if request.stop is None else request.stop
            if stop - start > MAX_RANGE:
                raise ClientMistake(
                    ErrorCode.VALIDATION,
                    f"these are {stop - start} tasks, but at most {MAX_RANGE} can be read at a time",
                )
            return {"tasks": [_task_entry(app, request.split, index) for index in range(start, stop)]}


def task_for(app: TaskApp, request: ResetRequest) -> PlatformTask:
    """Returns a task by key, by split and index, or a random one: by the seed, if there is one. May build a world, so
    it must not run on the event loop."""
    if request.task_key is not None:
        if request.split is not None or request.index is not None:
            raise ClientMistake(ErrorCode.VALIDATION, "reset: send either task_key, or split and index")
        return _made(app, request.task_key)
    if request.index is not None and request.split is None:
        raise ClientMistake(ErrorCode.VALIDATION, f"reset: index needs a split ({', '.join(SPLITS)})")
    split = request.split or "train"
    if not app.templates:
        raise ClientMistake(ErrorCode.EXECUTION, f"{app.key} has no tasks")
    index = request.index
    if index is None:
        drawn = random.randrange(count(app, split)) if request.seed is None else request.seed
        index = drawn % count(app, split)
    return make_task(key_at(app, split, index))


def _made(app: TaskApp, key: str) -> PlatformTask:
    try:
        parsed = TaskKey.parse(key)
        if parsed.app != app.key:
            raise ClientMistake(
                ErrorCode.VALIDATION, f"{key} is a task of {parsed.app}, but this environment is {app.key}"
            )
        return make_task(parsed)
    except PlatformError as e:
        raise ClientMistake(ErrorCode.VALIDATION, str(e)) from None


def _numbers(split: str) -> range:
    if split not in SPLITS:
        raise ClientMistake(ErrorCode.VALIDATION, f"there is no split {split[:64]!r}: {', '.join(SPLITS)}")
    return SPLITS[split]


def _task_entry(app: TaskApp, split: str, index: int) -> TaskEntry:
    task = make_task(key_at(app, split, index))
    return {
        "task_key": str(task.key),
        "split": split,
        "index": index,
        "prompt": task.prompt,
        "variables": dict(task.variables),
        "difficulty": task.key.difficulty,
        "max_turns": task.template.max_turns,
    }


def _parsed(given: JsonPayload, kind: object) -> Any:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as e:
        raise ClientMistake(ErrorCode.VALIDATION, str(e)) from None
