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
    return gym_entries(name, config)[0]


def gym_entries(name: str, config: str, search_dir: Path | None = None) -> list[JsonObject]:
    """Returns entries for the agents of a gym's file that have rows, played in a gym that is started for them. The
    first has the given name. `config` is a path as `palestra gym run -c` takes it. Raises ConfigError if there are
    none."""
    roots = search_roots([] if search_dir is None else [search_dir])
    file = find_below(roots, config)
    if file is None:
        raise ConfigError([f"{name}: there is no file {config}"])
    found: list[JsonObject] = []
    for agent, rows in _agents(yaml.safe_load(file.read_text(encoding="utf-8"))):
        if (place := find_below(roots, rows)) is not None:
            gym: JsonObject = {"files": [config, MODEL_SERVER], "agent": agent}
            gym |= {} if search_dir is None else {"search_dirs": [str(search_dir)]}
            label = name if not found else f"{GYM}{agent}"
            found.append({"name": label, "eval_tasks": str(place), "config": gym})
    if not found:
        raise ConfigError([f"{name}: {file} names no agent with rows that are here; give both in a config file"])
    return found


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
