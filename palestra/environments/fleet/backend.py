"""The backend of a Fleet task: one instance of an app, wherever it runs.

A backend is for one episode: `create`, then the rest, and `close` whatever happened.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NotRequired, Protocol, TypedDict, runtime_checkable

import msgspec

from palestra.environments.fleet.records import FleetTask
from palestra.environments.fleet.settings import FleetSettings
from palestra.environments.platform.diff_records import RowDiff, TableDiff
from palestra.environments.platform.scripted_user import HiddenFacts
from palestra.environments.platform.verifiers import VerifierExecution
from palestra.types.openai import ChatTool
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonPayload

MAX_CHANGES = 50  # that are kept with a grade, for people to read


class ChangedRow(TypedDict):
    """A row that an episode has changed."""

    table: str
    kind: str
    key: list[object]
    before: NotRequired[JsonPayload]
    after: NotRequired[JsonPayload]
    fields: NotRequired[list[str]]
    """Names of the columns that an update has changed."""


class ToolAnswer(msgspec.Struct, frozen=True):
    """The result of a tool call."""

    result: Any
    """A JSON value; text if it is not JSON."""
    error: str = ""
    """The error that the tool reported."""
    progress: float | None = None
    """The share of the task's sub-goals that is met after this call, if the settings ask for it."""


class FleetGrade(msgspec.Struct, frozen=True, kw_only=True):
    """The verifier's result for an episode."""

    score: float | None
    """None: unknown, because the verifier itself failed, or returned no score."""
    partial: float = 0.0
    """The partial reward, for those who use it, if the score is 0."""
    stdout: str = ""
    error: str = ""
    met: list[str] = []
    """Names of the checks that passed, if the platform itself has judged."""
    missed: list[str] = []
    changes: list[ChangedRow] = []
    """Rows that the episode has changed, before and after; the first of very many."""
    user: HiddenFacts = {}
    """The facts that only the user of the task knew, and what both said."""

    @classmethod
    def of(cls, done: VerifierExecution) -> FleetGrade:
        return cls(score=done.score, partial=partial_score(done.stdout), stdout=done.stdout, error=done.error)


def changed_rows(diff: Mapping[str, TableDiff]) -> list[ChangedRow]:
    """The structured diff of Fleet's runner, a record for each row, as the platform's own changes are."""
    found: list[ChangedRow] = []
    for table, rows in diff.items():
        added, removed = rows["added_rows"], rows["removed_rows"]
        found.extend({"table": table, "kind": "insert", "key": _key(row), "after": row["data"]} for row in added)
        found.extend({"table": table, "kind": "delete", "key": _key(row), "before": row["data"]} for row in removed)
        for row in rows["modified_rows"]:
            changes = row.get("changes", {})
            before = {**row["data"], **{name: one["before"] for name, one in changes.items()}}
            changed: ChangedRow = {"table": table, "kind": "update", "key": _key(row), "before": before}
            found.append({**changed, "after": row["data"], "fields": list(changes)})
    return found


def _key(row: RowDiff) -> list[object]:
    key = row["row_id"]
    return key if isinstance(key, list) else [key]


class FleetAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """What a verifier may use in addition to the instance."""

    answer: str | None = None
    conversation: Sequence[Message] = ()


class FleetBackend(Protocol):
    """One instance of an app for one episode: made, called, verified and closed."""

    async def create(self) -> None:
        """Makes the instance. Raises BackendError."""
        ...

    async def list_tools(self) -> list[ChatTool]: ...

    async def call_tool(self, name: str, arguments: JsonPayload) -> ToolAnswer:
        """Calls a tool. An error that the tool itself reports is an answer. Raises BackendError if the instance does
        not exist any more."""
        ...

    async def verify(self, attempt: FleetAttempt) -> FleetGrade: ...

    async def close(self) -> None:
        """Closes the instance, also if it was never created; a second call does nothing."""
        ...


@runtime_checkable
class CopyableBackend(FleetBackend, Protocol):
    """A backend whose instances can be copied."""

    async def create(self, data: bytes | None = None) -> None:
        """Makes the instance, with the data of a snapshot as a copy of that one. Raises BackendError."""
        ...

    async def snapshot(self) -> bytes:
        """Returns all that the instance is. Raises BackendError."""
        ...


BackendFactory = Callable[[FleetTask, FleetSettings], FleetBackend]


BLOCK = r">>> {0}_ACCUMULATOR >>>\n(.*?)\n<<< {0}_ACCUMULATOR <<<"
ERRORS, SUCCESSES = (re.compile(BLOCK.format(name), re.DOTALL) for name in ("ERROR", "SUCCESS"))
APP_LINE = re.compile(r"^App (.+): ([01])\s*$", re.MULTILINE)
NOTHING_HAPPENED = re.compile(r"no (?:unexpected|other|unwanted) (?:database )?changes", re.IGNORECASE)
"""Checks that are passed by doing nothing do not count towards a partial reward."""


def partial_score(stdout: str) -> float:
    """Returns a value from 0 to below 1."""
    apps = APP_LINE.findall(stdout)
    if apps:
        passed = [one == "1" for _, one in apps]
        earned = _counted(SUCCESSES, stdout)
        return sum(passed) / len(passed) if earned and not all(passed) else 0.0
    met, missed = len(_counted(SUCCESSES, stdout)), len(_listed(ERRORS, stdout))
    return met / (met + missed) if missed else 0.0


def _counted(block: re.Pattern[str], stdout: str) -> list[Any]:
    return [one for one in _listed(block, stdout) if not NOTHING_HAPPENED.search(str(one))]


def _listed(block: re.Pattern[str], stdout: str) -> list[Any]:
    found: list[Any] = []
    for text in block.findall(stdout):
        value = _read(text)
        found += value if isinstance(value, list) else []
    return found


def _read(text: str) -> Any:
    """Parses JSON or, as most verifiers print it, Python's notation."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
