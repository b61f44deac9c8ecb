"""Platform tasks as a Fleet tasks_file: each with a verifier in Python source that needs nothing of ours.

Owns: the file, the source. Never touches: instances.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from palestra.environments.fleet.exported_verifier import grade
from palestra.environments.platform import Deleted, Expected, Inserted, PlatformTask, TaskKey, Text, Updated, make_task
from palestra.environments.platform.changes import tables_of
from palestra.environments.platform.expectations import FREE

SOURCE = """\
def {name}(env, final_answer=None):
    task = json.loads({task!r})

{grade}
    return TASK_SUCCESSFUL_SCORE if grade(env, final_answer, task) else TASK_FAILED_SCORE
"""


def export_tasks(keys: Iterable[TaskKey | str], file: Path) -> int:
    """How many it wrote."""
    rows = [fleet_row(make_task(key)) for key in keys]
    file.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
    return len(rows)


def fleet_row(task: PlatformTask) -> dict[str, Any]:
    """In the spelling of Fleet's own exports and in that of OpenEnv: Fleet's `FleetTaskEnv` reads `data_key` only."""
    key, app, data = str(task.key), task.app, task.seed.key
    return {
        "key": key,
        "task_key": key,
        "prompt": task.prompt,
        "env_id": app.key,
        "env_key": app.key,
        "version": app.version,
        "env_version": app.version,
        "data_id": data,
        "data_key": data,
        "data_version": app.version,
        "verifier_func": verifier_source(task),
        "task_modality": "tool_use",
        "env_variables": dict(task.variables),
        "difficulty": _level(task.template.difficulty),
        "max_turns": task.template.max_turns,
        "metadata": {"template": task.template.name, "difficulty": task.template.difficulty, "params": task.params},
    }


def verifier_source(task: PlatformTask) -> str:
    """With the names that a verifier finds without importing them, and the standard library."""
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
        "apps": bool(task.app.parts),
        "answer": None if answer is None else {"kind": answer.kind, "text": answer.text},
        "calls": None if calls is None else {"tools": calls.tools, "only": calls.only},
    }
    name = "verify_" + re.sub(r"\W", "_", str(task.key))
    return SOURCE.format(name=name, task=json.dumps(facts), grade=_grade_source())


@lru_cache(maxsize=1)
def _grade_source() -> str:
    return textwrap.indent(inspect.getsource(grade), "    ")


def _expected(wanted: Expected) -> dict[str, Any]:
    match wanted:
        case Inserted(table=table, fields=fields, others=others):
            return {"table": table, "kind": "insert", "fields": _fields(fields), "others": others}
        case Updated(table=table, key=key, fields=fields):
            return {"table": table, "kind": "update", "key": key, "fields": _fields(fields)}
        case Deleted(table=table, key=key):
            return {"table": table, "kind": "delete", "key": key, "fields": {}}


def _fields(fields: Any) -> dict[str, Sequence[Any]]:
    return {name: _value(value) for name, value in fields.items()}


def _value(value: Any) -> list[Any]:
    if value is FREE:
        return ["free", None]
    return ["text", value.wanted] if isinstance(value, Text) else ["is", value]


def _level(difficulty: str) -> int:
    """Fleet's: 1 easy, 2 medium, 3 hard."""
    return max(1, int(difficulty[0]))
