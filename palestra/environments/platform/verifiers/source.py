"""A platform task's verifier as Python source that needs nothing of ours."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from palestra.environments.platform.changes import tables_of
from palestra.environments.platform.expectations import (
    FREE,
    DeletedRow,
    Expected,
    FreeText,
    InsertedRow,
    NewRow,
    UpdatedRow,
)
from palestra.environments.platform.task_records import PlatformTask
from palestra.environments.platform.verifiers.exported import grade
from palestra.util.json_types import JsonPayload

SOURCE = """\
def {name}(env, final_answer=None):
    task = json.loads({task!r})

{grade}
    return TASK_SUCCESSFUL_SCORE if grade(env, final_answer, task) else TASK_FAILED_SCORE
"""


def verifier_source(task: PlatformTask) -> str:
    """Returns Python source that uses the names that a verifier finds without importing them, and the standard
    library."""
    template, seed = task.template, task.seed
    answer = template.answer(task.params) if template.answer else None
    calls = template.process(task.params) if template.process else None
    with seed.lock:
        tables = tables_of(seed.connection)
    facts = {
        "tables": {
            table.name: {
                "key": table.key,
                "columns": [c for c in table.columns if c not in task.app.volatile.get(table.name, ())],
            }
            for table in tables
        },
        "expected": [_expected(one) for one in template.expect(task.params, seed)],
        "goals": [len(goal) for goal in template.goals.expect(task.params, seed)] if template.goals else [],
        "apps": bool(task.app.parts),
        "answer": None if answer is None else {"kind": answer.kind, "text": answer.text},
        "calls": None if calls is None else {"tools": calls.tools, "only": calls.only},
    }
    name = "verify_" + re.sub(r"\W", "_", str(task.key))
    return SOURCE.format(name=name, task=json.dumps(facts), grade=_grade_source())


@lru_cache(maxsize=1)
def _grade_source() -> str:
    return textwrap.indent(inspect.getsource(grade), "    ")


def _expected(wanted: Expected) -> JsonPayload:
    match wanted:
        case InsertedRow(table=table, fields=fields, others=others):
            return {"table": table, "kind": "insert", "fields": _fields(fields), "others": others}
        case UpdatedRow(table=table, key=key, fields=fields):
            return {"table": table, "kind": "update", "key": key, "fields": _fields(fields)}
        case DeletedRow(table=table, key=key):
            return {"table": table, "kind": "delete", "key": key, "fields": {}}


def _fields(fields: Any) -> dict[str, Sequence[Any]]:
    return {name: _value(value) for name, value in fields.items()}


def _value(value: object) -> list[Any]:
    if value is FREE:
        return ["free", None]
    if isinstance(value, NewRow):
        return ["new", value.name]
    return ["text", value.wanted] if isinstance(value, FreeText) else ["is", value]
