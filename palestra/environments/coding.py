"""Coding tasks as tasks of a run. They are played by agents in sandboxes, not turn by turn in this process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from palestra.coding import CodingTask, TaskError, read_tasks
from palestra.coding.shipped_tasks import SHIPPED
from palestra.environments.errors import TaskFileError
from palestra.types.rollouts import CODING, Task

if TYPE_CHECKING:
    from palestra.config.environment_entries import EnvironmentEntry


def task_folders(entry: EnvironmentEntry) -> list[Path]:
    """Returns the folders of all tasks of an entry."""
    return [entry.tasks or SHIPPED, *([entry.eval_tasks] if entry.eval_tasks else [])]


def entry_tasks(entry: EnvironmentEntry, split: Literal["train", "eval"]) -> list[Task]:
    """Returns the tasks of an entry as a run has them. Raises TaskFileError."""
    folder = (entry.tasks or SHIPPED) if split == "train" else entry.eval_tasks
    try:
        return [] if folder is None else [_task(one) for one in read_tasks(folder)]
    except TaskError as error:
        raise TaskFileError(str(error)) from error


def _task(task: CodingTask) -> Task:
    extras = {"level": task.level} if task.level else {}
    return Task(id=task.id, environment=CODING, prompt=[{"role": "user", "content": task.instruction}], extras=extras)
