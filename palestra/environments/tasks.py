"""Task files: one task in each row.

A row is `{"prompt": text or messages, "id": optional, ...}`, and all other fields are the task's extras. A row with
`env_class` is one of SkyRL's datasets, whose extras are all but `prompt` and `env_class`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar, overload

import msgspec

from palestra.data.errors import DatasetError
from palestra.data.pictures import has_places, with_pictures
from palestra.data.rows import read_rows as read_dataset
from palestra.environments.errors import TaskFileError
from palestra.environments.step_results import shown
from palestra.types.rollouts import Message, Task
from palestra.util.json_types import JsonMapping

K = TypeVar("K")


class LazyTasks(Sequence[Task], Generic[K]):
    def __init__(self, keys: Sequence[K], make: Callable[[K], Task]) -> None:
        self._keys, self._make = keys, make

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return LazyTasks(self._keys[index], self._make)
        return self._make(self._keys[index])


ID_BYTES = 8  # of a row's hash: two of a million rows collide once in 30 million files


class Row(msgspec.Struct, frozen=True):
    where: str
    """The file and the line, for messages."""
    content: JsonMapping
    folder: Path = Path()
    """Folder from which paths of pictures are read."""


def read_tasks(file: Path, environment: str) -> list[Task]:
    """Reads tasks. Raises TaskFileError."""
    tasks = tasks_of_rows(read_rows(file), environment)
    if not tasks:
        raise TaskFileError(f"{file} has no tasks; it should hold one JSON object with a prompt in each line")
    return tasks


def tasks_of_rows(rows: Iterable[Row], environment: str) -> list[Task]:
    """Raises TaskFileError."""
    reader = TaskReader(environment)
    return [reader.read(row) for row in rows]


class TaskReader:
    """Makes tasks of the rows of a file: their ids are unique, and they are all for one environment."""

    def __init__(self, environment: str) -> None:
        self._environment = environment
        self._seen: dict[str, str] = {}
        """The line of each id."""
        self._env_class: str | None = None

    def read(self, row: Row) -> Task:
        """Raises TaskFileError."""
        task, seen = _task(row, self._environment), self._seen
        if task.id in seen and "id" in row.content:
            raise TaskFileError(f"{row.where}: the id {task.id!r} is already used at {seen[task.id]}")
        if task.id in seen:
            task = msgspec.structs.replace(task, id=_free_id(task.id, seen))
        seen[task.id] = row.where
        named = row.content.get("env_class", self._env_class)
        if self._env_class is not None and named != self._env_class:
            raise TaskFileError(
                f"{row.where}: this task is for env_class {named!r}, but those before are for "
                f"{self._env_class!r}; use one file per environment"
            )
        self._env_class = named
        return task


def labelled_tasks(tasks: Sequence[Task], environment: str) -> Sequence[Task]:
    """Returns an environment's own tasks under the name it has in this run, as lazily as the given sequence."""
    return LazyTasks(tasks, lambda task: msgspec.structs.replace(task, environment=environment))


def read_rows(file: Path) -> Iterator[Row]:
    """Yields the rows of a file. Raises TaskFileError."""
    try:
        for row in read_dataset(file):
            yield Row(str(row.place), row.content(), Path(row.place.file).parent)
    except DatasetError as error:
        raise TaskFileError(str(error)) from None


def _task(row: Row, environment: str) -> Task:
    row_id, row = _id(row), _with_pictures(row)
    content = row.content
    left_out = {"prompt", "env_class"} if "env_class" in content else {"prompt", "id"}
    return Task(
        id=row_id,
        environment=environment,
        prompt=_prompt(row),
        extras={key: value for key, value in content.items() if key not in left_out},
        place=row.where,
    )


def _with_pictures(row: Row) -> Row:
    """Puts the row's pictures into its prompt, if that has places for them; other columns are the environment's."""
    if not has_places(row.content.get("prompt")):
        return row
    try:
        return msgspec.structs.replace(row, content=with_pictures(row.content, row.folder))
    except DatasetError as error:
        raise TaskFileError(f"{row.where}: {error.problem}") from None


def _prompt(row: Row) -> list[Message]:
    if "prompt" not in row.content:
        raise TaskFileError(f"{row.where}: no 'prompt' (it has {', '.join(row.content) or 'nothing'})")
    prompt = row.content["prompt"]
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or not prompt or not all(map(_is_message, prompt)):
        raise TaskFileError(
            f"{row.where}: 'prompt' should be text, or messages with role and content, but is {shown(prompt)}"
        )
    return [dict(message) for message in prompt]


def _is_message(found: object) -> bool:
    return isinstance(found, Mapping) and isinstance(found.get("role"), str) and "content" in found


def _id(row: Row) -> str:
    if "id" not in row.content:
        try:
            canonical = msgspec.json.encode(row.content, order="sorted")
        except Exception as error:  # boundary: rows of environments may contain anything
            raise TaskFileError(
                f"{row.where}: the row needs an 'id', since it cannot be written as JSON ({error})"
            ) from error
        return hashlib.blake2b(canonical, digest_size=ID_BYTES).hexdigest()
    found = row.content["id"]
    if isinstance(found, bool) or not isinstance(found, str | int) or found == "":
        raise TaskFileError(f"{row.where}: 'id' should be text or a whole number, but is {shown(found)}")
    return str(found)


def _free_id(row_id: str, seen: JsonMapping) -> str:
    """Returns an id for a repeated row: the same number each time the file is read."""
    copy = 2
    while f"{row_id}-{copy}" in seen:
        copy += 1
    return f"{row_id}-{copy}"
