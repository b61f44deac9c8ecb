"""Coding tasks as tasks of a run. They are played by agents in sandboxes, not turn by turn in this process.

Owns: what an episode's record says of a coding task. Never touches: sandboxes, agents.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.coding import CodingTask, TaskError, read_tasks
from palestra.environments.errors import TaskFileError
from palestra.types.rollouts import CODING, Task

if TYPE_CHECKING:
    from palestra.config.environment_entries import EnvironmentEntry


def task_folders(entry: EnvironmentEntry) -> list[Path]:
    return [folder for folder in (entry.tasks, entry.eval_tasks) if folder is not None]


def coding_tasks(folder: Path) -> Sequence[Task]:
    """Returns the tasks of a folder as a run has them. Raises TaskFileError."""
    try:
        return [_task(one) for one in read_tasks(folder)]
    except TaskError as error:
        raise TaskFileError(str(error)) from error


def _task(task: CodingTask) -> Task:
    extras = {"level": task.level} if task.level else {}
    return Task(id=task.id, environment=CODING, prompt=[{"role": "user", "content": task.instruction}], extras=extras)
