"""Platform tasks as a Fleet tasks_file: each with a verifier in Python source that needs nothing of ours.

Owns: the file. Never touches: instances, the source.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from palestra.environments.platform import PlatformTask, TaskKey, make_task
from palestra.environments.platform.verifiers.source import verifier_source
from palestra.util.json_types import JsonObject


def export_tasks(keys: Iterable[TaskKey | str], file: Path) -> int:
    """How many it wrote."""
    rows = [fleet_row(make_task(key)) for key in keys]
    file.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
    return len(rows)


def fleet_row(task: PlatformTask) -> JsonObject:
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


def _level(difficulty: str) -> int:
    """Fleet's: 1 easy, 2 medium, 3 hard."""
    return max(1, int(difficulty[0]))
