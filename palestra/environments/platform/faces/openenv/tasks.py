"""Tasks by split and index, as OpenEnv's Task API and `reset` name them.

Owns: which task an index is, drawing one. Never touches: sessions. The templates of an app take turns: with n of them,
index i is number i // n of template i % n.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from palestra.environments.platform.app import App
from palestra.environments.platform.errors import PlatformError
from palestra.environments.platform.faces.openenv.wire import ErrorCode, Mistake, Reset
from palestra.environments.platform.task_records import FIRST_EVAL, MAX_NUMBER, PlatformTask, TaskKey
from palestra.environments.platform.tasks import make_task
from palestra.util.json_types import JsonObject

SPLITS = {"train": range(FIRST_EVAL), "eval": range(FIRST_EVAL, MAX_NUMBER)}
TYPES = {"train": "train", "eval": "validation"}
"""OpenEnv knows train, validation and test."""
PER_TEMPLATE = 10  # where somebody wants all of them: there are billions
MAX_RANGE = 1000
PATHS = ("tasks", "num_tasks", "task", "task_range")


class Range(msgspec.Struct, forbid_unknown_fields=True):
    split: str
    start: int | None = None
    stop: int | None = None


class OneOf(msgspec.Struct, forbid_unknown_fields=True):
    split: str
    index: int


class Split(msgspec.Struct, forbid_unknown_fields=True):
    split: str


def splits() -> list[dict[str, str]]:
    return [{"name": name, "type": kind} for name, kind in TYPES.items()]


def count(app: App, split: str) -> int:
    return len(app.templates) * len(_numbers(split))


def key_at(app: App, split: str, index: int) -> TaskKey:
    if not 0 <= index < count(app, split):
        raise Mistake(ErrorCode.VALIDATION, f"{app.key} has no task {index} in {split}: 0 to {count(app, split) - 1}")
    number, turn = divmod(index, len(app.templates))
    template = app.templates[turn]
    return TaskKey(app.key, template.name, template.difficulty, _numbers(split)[number])


def answer(app: App, what: str, given: JsonObject) -> JsonObject:
    """`what` as the path ends."""
    match what:
        case "num_tasks":
            return {"num_tasks": count(app, _asked(given, Split).split)}
        case "tasks":
            split = _asked(given, Split).split
            shown = range(min(count(app, split), PER_TEMPLATE * len(app.templates)))
            return {"tasks": [_told(app, split, index) for index in shown], "env_name": app.key}
        case "task":
            one = _asked(given, OneOf)
            return {"task": _told(app, one.split, one.index)}
        case _:
            asked = _asked(given, Range)
            start, stop = asked.start or 0, count(app, asked.split) if asked.stop is None else asked.stop
            if stop - start > MAX_RANGE:
                raise Mistake(ErrorCode.VALIDATION, f"that is {stop - start} tasks: at most {MAX_RANGE} at a time")
            return {"tasks": [_told(app, asked.split, index) for index in range(start, stop)]}


def task_for(app: App, asked: Reset) -> PlatformTask:
    """By key, by split and index, or drawn: by the seed, if there is one. May build a world: not for the event loop."""
    if asked.task_key is not None:
        if asked.split is not None or asked.index is not None:
            raise Mistake(ErrorCode.VALIDATION, "reset: task_key alone, or split and index")
        return _made(app, asked.task_key)
    if asked.index is not None and asked.split is None:
        raise Mistake(ErrorCode.VALIDATION, f"reset: index needs a split ({', '.join(SPLITS)})")
    split = asked.split or "train"
    if not app.templates:
        raise Mistake(ErrorCode.EXECUTION, f"{app.key} has no tasks")
    index = asked.index
    if index is None:
        drawn = random.randrange(count(app, split)) if asked.seed is None else asked.seed
        index = drawn % count(app, split)
    return make_task(key_at(app, split, index))


def _made(app: App, key: str) -> PlatformTask:
    try:
        parsed = TaskKey.parse(key)
        if parsed.app != app.key:
            raise Mistake(ErrorCode.VALIDATION, f"{key} is a task of {parsed.app}, and this is {app.key}")
        return make_task(parsed)
    except PlatformError as e:
        raise Mistake(ErrorCode.VALIDATION, str(e)) from None


def _numbers(split: str) -> range:
    if split not in SPLITS:
        raise Mistake(ErrorCode.VALIDATION, f"there is no split {split[:64]!r}: {', '.join(SPLITS)}")
    return SPLITS[split]


def _told(app: App, split: str, index: int) -> JsonObject:
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


def _asked(given: JsonObject, kind: object) -> Any:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as e:
        raise Mistake(ErrorCode.VALIDATION, str(e)) from None
