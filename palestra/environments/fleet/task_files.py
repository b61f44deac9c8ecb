"""Reads tasks from a file in Fleet's shape, or makes them on the local platform.

Names of tasks of the platform:

    platform:keys                                   any task of the app, made again from its key
    platform:mail?difficulty=0,1&count=200          and for training so many, of these
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra.environments.fleet.platform_tasks import PLATFORM, PlatformTasks
from palestra.environments.fleet.records import FleetTask

SHOWN_KEYS = 5

_read: dict[str, dict[str, FleetTask]] = {}
"""Tasks that were read, by the file as it was named."""
_lock = threading.Lock()
"""Protects the cache of files."""


def find_task(tasks_file: str, task_key: str) -> FleetTask:
    """Returns a task. Raises FileNotFoundError or ValueError."""
    if tasks_file.startswith(PLATFORM):
        return PlatformTasks.parse(tasks_file).find(task_key)
    tasks = load_tasks(tasks_file)
    if task_key not in tasks:
        some = ", ".join(list(tasks)[:SHOWN_KEYS])
        raise ValueError(f"task_key {task_key!r} is not in {tasks_file}; it has {some}{_more(len(tasks))}")
    return tasks[task_key]


def load_tasks(tasks_file: str) -> dict[str, FleetTask]:
    """Returns tasks by key, in the file's order; if two have the same key, the first counts."""
    with _lock:
        if tasks_file not in _read:
            _read[tasks_file] = _load(tasks_file)
        return _read[tasks_file]


def clear_caches() -> None:
    """Forgets the task files that were read: the next use reads them again."""
    with _lock:
        _read.clear()


def _load(tasks_file: str) -> dict[str, FleetTask]:
    file = Path(tasks_file).expanduser()
    if not file.exists():
        raise FileNotFoundError(f"there is no tasks_file {file}")
    try:
        content: Any = json.loads(file.read_bytes())
    except ValueError as e:
        raise ValueError(f"{file} is not valid JSON: {e}") from None
    rows = content.get("tasks") if isinstance(content, Mapping) else content
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(f'{file} should hold a list of tasks, or {{"tasks": [...]}}')
    if not rows:
        raise ValueError(f"{file} has no tasks")
    found: dict[str, FleetTask] = {}
    for place, row in enumerate(rows):
        task = FleetTask.of(row, f"{file}, task {place}")
        found.setdefault(task.task_key, task)
    return found


def _more(count: int) -> str:
    return f" and {count - SHOWN_KEYS} more" if count > SHOWN_KEYS else ""
