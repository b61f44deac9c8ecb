"""Makes the config of the training process from AgentJet's: the model as it is served here, tasks, folders, a name."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.config import ConfigError
from palestra.config.load import validate
from palestra.config.serve import ModelConfig
from palestra.server.agentjet.settings import JobConfig, map_job
from palestra.server.agentjet.settings_file import AgentJetError
from palestra.server.agentjet.trainer_files import ENVIRONMENT, TrainerFolder
from palestra.server.agentjet.trainer_records import TrainerRecord
from palestra.util.json_types import JsonObject

if TYPE_CHECKING:
    from palestra.config.train import GrpoConfig

NAMELESS = "agentjet"


def map_for_server(text: str, models: Sequence[ModelConfig]) -> JobConfig:
    job = map_job(text, lambda asked: _served(asked, models).name[0])
    model = _served(job.mapped["model.name"], models)
    job.layers.merge({"model": {"tokenizer": str(model.path)}}, "this server")
    return job


def name_run(requested: str | None, record: TrainerRecord, folder: TrainerFolder, taken: Collection[str]) -> str:
    """Returns the name of the run. A run of the requested name that is not complete is continued; without a name each
    run is new."""
    base = requested or f"{NAMELESS}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in count(1):
        name = base if number == 1 else f"{base}-{number}"
        is_ours = folder.has_begun(name)
        if is_ours and requested is not None and name not in record.done:
            return name
        if not is_ours and name not in taken:
            return name
    raise AssertionError("numbers do not end")


def make_config(job: JobConfig, run: str, folder: TrainerFolder, url: str) -> JsonObject:
    """Makes the config, checked as `palestra train` checks it, and writes its tasks."""
    tasks = folder.make_tasks(run, "train", job.train_file)
    entry: JsonObject = {"name": ENVIRONMENT, "tasks": str(folder.tasks_file(run, "train"))}
    if job.eval_file is not None:
        folder.make_tasks(run, "eval", job.eval_file)
        entry["eval_tasks"] = str(folder.tasks_file(run, "eval"))
    ours = {"kind": "grpo", "server": url, "runs": str(folder.runs), "environments": [entry]}
    job.layers.merge(renamed(ours | {"rollouts": "episodes", "episodes": {"players": 0}}, run), "this server")
    config = _checked(job)
    if job.epochs is not None:
        steps = max(1, job.epochs * tasks // config.rollout.groups_per_step)
        job.set("steps", steps, "ajet.trainer_common.total_epochs")
        config = _checked(job)
    job.mapped["name"] = run
    return config.model_dump(mode="json")


def renamed(config: JsonObject, run: str) -> JsonObject:
    return config | {"name": run, "alias": run, "episodes": config["episodes"] | {"run": run}}


def _checked(job: JobConfig) -> GrpoConfig:
    from palestra.config.train import GrpoConfig  # imported late: servers start without it

    try:
        return validate(GrpoConfig, job.layers)
    except ConfigError as error:
        raise AgentJetError(str(error)) from None


def _served(requested: str, models: Sequence[ModelConfig]) -> ModelConfig:
    """Finds a served model by its name, by its folder, or by the last part of a path, because a folder has another
    place on another machine."""
    last = requested.rstrip("/").rpartition("/")[2]
    for is_meant in (
        lambda model: requested in model.name,
        lambda model: Path(requested).is_absolute() and Path(requested) == model.path,
        lambda model: last in {name.rpartition("/")[2] for name in model.name},
    ):
        if (found := next((model for model in models if is_meant(model)), None)) is not None:
            return found
    names = ", ".join(name for model in models for name in model.name)
    raise AgentJetError(f"ajet.model.path: {requested[:200]!r} is not served here; this server has: {names}")
