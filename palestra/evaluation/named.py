"""What is evaluated, by its name on the command line.

Owns: names of environments, gyms, platform apps and files, as entries of the config. Never touches: playing them.

| name | |
| --- | --- |
| `stockroom`, `package.module:Class` | an environment |
| `gym:mcqa` | a gym's resources server with its agent and rows, by its name below the search folders |
| `platform:keys?difficulty=0a` | tasks of an app of the local platform |
| `file.jsonl`, `file.parquet` | questions with their answers: the environment `answers` |
| `./my-tasks` | a folder of coding tasks, which an agent plays: the environment `coding` |
"""

from __future__ import annotations

from pathlib import Path

import yaml

from palestra.config.errors import ConfigError
from palestra.data.sources import SUFFIXES
from palestra.gym.errors import GymConfigError
from palestra.gym.search_folders import CatalogKind, config_named, find_below, search_roots
from palestra.types.rollouts import CODING
from palestra.util.json_types import JsonObject

GYM, PLATFORM = "gym:", "platform:"
MODEL_SERVER = "responses_api_models/vllm_model/configs/vllm_model.yaml"
SPLITS = ("validation", "test", "example", "train")
"""Types of a gym's datasets, the best first."""


def entry_named(name: str) -> JsonObject:
    """Returns an entry of `environments`. Raises ConfigError."""
    if name.endswith(SUFFIXES):
        return {"name": "answers", "eval_tasks": name}
    if Path(name).is_dir():
        return {"name": CODING, "eval_tasks": name}
    if name.startswith(PLATFORM):
        return {"name": "fleet_task", "config": {"tasks_file": name}}
    return _gym_entry(name) if name.startswith(GYM) else {"name": name}


def _gym_entry(name: str) -> JsonObject:
    roots = search_roots()
    try:
        config = config_named(CatalogKind.RESOURCES_SERVERS, name.removeprefix(GYM), roots)
    except GymConfigError as error:
        raise ConfigError([f"{name}: {error}"]) from None
    file = find_below(roots, config)
    assert file is not None
    for agent, rows in _agents(yaml.safe_load(file.read_text(encoding="utf-8"))):
        if (found := find_below(roots, rows)) is not None:
            gym = {"files": [config, MODEL_SERVER], "agent": agent}
            return {"name": name, "eval_tasks": str(found), "config": gym}
    raise ConfigError([f"{name}: {file} names no agent with rows that are here; give both in a config file"])


def _agents(content: object) -> list[tuple[str, Path]]:
    """Agents of a gym's file, each with the best of its datasets."""
    found: list[tuple[str, Path]] = []
    for agent, server in content.items() if isinstance(content, dict) else ():
        kinds = server.get("responses_api_agents") if isinstance(server, dict) else None
        for settings in kinds.values() if isinstance(kinds, dict) else ():
            datasets = [one for one in settings.get("datasets") or [] if one.get("type") in SPLITS]
            ordered = sorted(datasets, key=lambda one: SPLITS.index(one["type"]))
            found += [(agent, Path(one["jsonl_fpath"])) for one in ordered]
    return found
