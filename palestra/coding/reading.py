"""Task folders: Harbor's, Terminal-Bench's, and folders of them."""

from __future__ import annotations

from pathlib import Path

from palestra.coding import harbor, terminal_bench
from palestra.coding.errors import TaskError
from palestra.coding.task import CodingTask

FORMATS = {harbor.SETTINGS: harbor.read, terminal_bench.SETTINGS: terminal_bench.read}


def read_task(folder: Path) -> CodingTask:
    """Reads the task in a folder. Raises TaskError, whose text names the file and what to do."""
    for name, read in FORMATS.items():
        if (folder / name).is_file():
            try:
                return read(folder.absolute())
            except (OSError, UnicodeDecodeError) as error:
                raise TaskError(f"{folder} cannot be read: {error}") from error
    if not folder.is_dir():
        raise TaskError(f"{folder} is no folder; name the folder of a task, or a folder of such folders")
    raise TaskError(f"{folder} is no task: it has neither {' nor '.join(FORMATS)}")


def read_tasks(folder: Path) -> list[CodingTask]:
    """Reads a folder of task folders, or of one task; ordered by name. Raises TaskError."""
    if _is_task(folder):
        return [read_task(folder)]
    found = sorted(one for one in folder.iterdir() if _is_task(one)) if folder.is_dir() else []
    if not found:
        raise TaskError(f"there are no tasks in {folder}: none of its folders has {' or '.join(FORMATS)}")
    return [read_task(one) for one in found]


def _is_task(folder: Path) -> bool:
    return any((folder / name).is_file() for name in FORMATS)
