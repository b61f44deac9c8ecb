"""Rows for gym servers as tasks of a run.

A row is sent to its agent unchanged; it is the task's `row`, and the prompt is for people to read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from palestra.environments.errors import TaskFileError
from palestra.environments.guarded_calls import error_text, place_of
from palestra.environments.registry import spec
from palestra.environments.step_results import shown
from palestra.environments.tasks import Row, read_rows, tasks_of_rows
from palestra.types.gym import AGENT_REF, EXTRA_BODY, PARAMS, overruled
from palestra.types.rollouts import Message, Task
from palestra.util.json_types import JsonMapping

if TYPE_CHECKING:
    from palestra.config.environment_entries import EnvironmentEntry

log = logging.getLogger(__name__)

ROW = "row"
"""Key in a task's extras: what its agent gets."""
LABELS = ("data_source", "level")
"""Fields of a row by which metrics are split."""


def gym_tasks(entry: EnvironmentEntry, split: str) -> Sequence[Task]:
    """Returns tasks. Raises TaskFileError with the line."""
    from palestra.config.environment_entries import gym_entry  # imported here: environments need no pydantic

    known = gym_entry(entry)
    file = entry.tasks if split == "train" else entry.eval_tasks
    if file is not None:
        rows = read_rows(file.expanduser())
    elif known.rows is not None:
        rows = _made(known.rows, split)
    else:
        return []
    wrapped = [_wrapped(row, known.agent) for row in rows]
    note = overruled(known.agent, [row.content[ROW][AGENT_REF]["name"] for row in wrapped])
    if note is not None and AGENT_REF not in entry.extras:
        _warn(
            f"environment {entry.name!r}, {split}: {note}; to have it play them all: "
            f"extras: {{{AGENT_REF}: {{name: {known.agent}}}}}"
        )
    return tasks_of_rows(wrapped, entry.name)


@cache
def _warn(text: str) -> None:
    """Warns once, however often the same rows are read."""
    log.warning(text)


def _made(name: str, split: str) -> Iterable[Row]:
    make = spec(name).load()
    try:
        found = list(make(split))
    except (Exception, SystemExit) as error:
        raise TaskFileError(f"{name}({split!r}) raised {error_text(error)}{place_of(error, __file__)}") from error
    for place, row in enumerate(found):
        where = f"{name}({split!r})[{place}]"
        if not isinstance(row, Mapping):
            raise TaskFileError(f"{where}: a row must be an object, but this is {shown(row)}")
        try:
            yield Row(where, msgspec.json.decode(msgspec.json.encode(row)))
        except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
            raise TaskFileError(f"{where}: it cannot be written as JSON ({error})") from None


def _wrapped(row: Row, agent: str | None) -> Row:
    content = dict(row.content)
    params = content.get(PARAMS)
    if not isinstance(params, Mapping) or not isinstance(params.get("input"), str | list):
        raise TaskFileError(
            f"{row.where}: {PARAMS}.input is missing; a gym's agents need it, as text or a list of messages"
        )
    _check_sampling(row.where, params)
    named = content.get(AGENT_REF)
    if not isinstance(named, Mapping) or not isinstance(named.get("name"), str):
        if agent is None:
            raise TaskFileError(f"{row.where}: it names no agent; add agent_ref to it, or set config.agent")
        content[AGENT_REF] = {"name": agent}
    labels = {name: content[name] for name in LABELS if isinstance(content.get(name), str)}
    return Row(row.where, {"prompt": messages_of(params["input"]), ROW: content, **labels})


def _check_sampling(where: str, params: JsonMapping) -> None:
    """Checks the sampling parameters that a run will change."""
    limit = params.get("max_output_tokens")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise TaskFileError(
            f"{where}: {PARAMS}.max_output_tokens should be a positive whole number, but is {shown(limit)}"
        )
    metadata = params.get("metadata") or {}
    extra = metadata.get(EXTRA_BODY) if isinstance(metadata, Mapping) else metadata
    try:
        is_right = isinstance(metadata, Mapping) and (not extra or isinstance(msgspec.json.decode(extra), dict))
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        is_right = False
    if not is_right:
        raise TaskFileError(f"{where}: {PARAMS}.metadata.{EXTRA_BODY} should be the text of a JSON object")


def messages_of(given: str | list[Any]) -> list[Message]:
    """Returns the part of an input that can be read as messages."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found = [one for one in given if isinstance(one, Mapping) and isinstance(one.get("role"), str)]
    read = [{"role": one["role"], "content": _text(one.get("content"))} for one in found]
    return read or [{"role": "user", "content": ""}]


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part["text"]) for part in parts if isinstance(part, Mapping) and "text" in part)
