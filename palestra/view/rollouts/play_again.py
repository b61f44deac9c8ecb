"""Plays the task of a rollout again, by a person or by another model."""

from __future__ import annotations

import json
import shlex

from msgspec import Struct

from palestra.environments.platform import APPS, PlatformError, TaskKey
from palestra.runs.rollout_records import RolloutRecord
from palestra.runs.saved_checkpoints import checkpoint_names
from palestra.view.runs.catalogue import Catalogue

SAMPLES = 4


class PlayAgain(Struct, frozen=True):
    command: str
    """The command without the name of the model, which comes last."""
    arguments: list[str]
    """Arguments of the command, behind `palestra eval`."""
    models: list[str]
    """Checkpoints of the run, the newest first, and the model it began with."""
    platform_task: str | None
    """Key of the platform's task, for the page on which a person plays it."""


def how_to_play_again(catalogue: Catalogue, name: str, record: RolloutRecord) -> PlayAgain:
    run = catalogue.open(name)
    config = run.read_about().get("config")
    model = config.get("model") if isinstance(config, dict) else None
    base = model.get("name") if isinstance(model, dict) else model
    task, named = str(record.get("task")), f"{record.get('environment')}/{record.get('task')}"
    arguments = [str(run.path / "config.json"), f"task_ids={json.dumps([named])}", f"runs={catalogue.root}"]
    arguments += ["--samples", str(SAMPLES), "--model"]
    models = [*reversed(checkpoint_names(run)), *([base] if isinstance(base, str) else [])]
    return PlayAgain(shlex.join(["palestra", "eval", *arguments]), arguments, models, _platform_task(task))


def _platform_task(task: str) -> str | None:
    try:
        key = TaskKey.parse(task)
    except PlatformError:
        return None
    app = APPS.get(key.app)
    return task if app is not None and app.template(key.template) is not None else None
