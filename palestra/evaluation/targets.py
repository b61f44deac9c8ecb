"""Targets of an evaluation, by their name on the command line.

| name | |
| --- | --- |
| `gsm8k` | a benchmark |
| `stockroom`, `package.module:Class` | an environment |
| `gym:mcqa` | a gym's resources server with its agent and rows, by its name below the search folders |
| `platform:keys?difficulty=0a` | tasks of an app of the local platform |
| `file.jsonl`, `file.parquet` | questions with their answers: the environment `answers` |
| `./my-tasks` | a folder of coding tasks, which an agent plays: the environment `coding` |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

from palestra.config.errors import ConfigError
from palestra.data.sources import SUFFIXES
from palestra.environments.benchmarks.catalogue import BENCHMARKS, Benchmark
from palestra.environments.benchmarks.files import how_to_get
from palestra.environments.errors import TaskFileError
from palestra.gym.errors import GymConfigError
from palestra.gym.search_folders import CatalogKind, config_named, find_below, search_roots
from palestra.types.rollouts import CODING
from palestra.util.json_types import JsonObject
from palestra.util.suggest import did_you_mean

GYM, PLATFORM = "gym:", "platform:"
MODEL_SERVER = "responses_api_models/vllm_model/configs/vllm_model.yaml"
ALL_TASKS = 1_000_000
PROMPT_TOKENS = 8192  # room for the longest prompts, those of function calls
SPLITS = ("validation", "test", "example", "train")
"""Types of a gym's datasets, the best first."""


def entries_named(names: Sequence[str], data: Iterable[str] = (), graders: Iterable[str] = ()) -> list[JsonObject]:
    """Returns the entries of several names. `data` and `graders` are NAME=PATH, for benchmarks. Raises as
    `entry_named` does."""
    files, pythons = _paths("--data", data, names), _paths("--grader", graders, names)
    return [entry_named(name, files.get(name), pythons.get(name)) for name in names]


def _paths(option: str, given: Iterable[str], names: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise ConfigError([f"{option} {text}: it is {option} NAME=PATH, as in {option} gsm8k=PATH"])
        if name not in names:
            raise ConfigError([f"{option} {text}: {name!r} is not evaluated; {did_you_mean(name, names)}"])
        found[name] = path
    return found


def folder_names(name: str | None, models: Sequence[str]) -> list[str | None]:
    """Returns the names of the folders of several models: each is that of the evaluation and what its model is
    called."""
    if name is None or len(models) < 2:
        return [name] * max(1, len(models))
    called = [re.sub(r"[^A-Za-z0-9._-]+", "-", model.rstrip("/").rpartition("/")[2]) for model in models]
    return [f"{name}-{one}" if called.count(one) == 1 else f"{name}-{place}" for place, one in enumerate(called)]


def default_agent(names: Sequence[str]) -> str | None:
    """The agent that plays where a benchmark needs one and none is named."""
    is_coding = any(name in BENCHMARKS and BENCHMARKS[name].environment == CODING for name in names)
    return "shell" if is_coding else None


def entry_named(name: str, data: str | None = None, grader: str | None = None) -> JsonObject:
    """Returns an entry of `environments`. `data` is the file or folder of a benchmark, `grader` the Python that has
    its grader. Raises ConfigError, and TaskFileError if a benchmark's folder is not here."""
    if (benchmark := BENCHMARKS.get(name)) is not None:
        return _benchmark_entry(benchmark, data, grader)
    if data is not None or grader is not None:
        raise ConfigError([f"{name} is no benchmark, for which --data and --grader are; palestra eval list"])
    if name.endswith(SUFFIXES):
        return {"name": "answers", "eval_tasks": name}
    if Path(name).is_dir():
        return {"name": CODING, "eval_tasks": name}
    if name.startswith(PLATFORM):
        return {"name": "fleet_task", "config": {"tasks_file": name}}
    return _gym_entry(name) if name.startswith(GYM) else {"name": name}


def _benchmark_entry(benchmark: Benchmark, data: str | None, grader: str | None) -> JsonObject:
    if benchmark.environment == CODING:
        folder = str(benchmark_folder(benchmark, data))
        return {"name": CODING, "eval_tasks": folder, "extras": {"data_source": benchmark.name}}
    config: JsonObject = {}
    if data is not None:
        config["data"] = str(Path(data).expanduser().absolute())
    if grader is not None:
        config["python"] = str(Path(grader).expanduser().absolute())
    return {"name": benchmark.name, "config": config}


def benchmark_folder(benchmark: Benchmark, given: str | None) -> Path:
    """Returns the folder of a benchmark's task folders: the one that is given, or one of its name here. Raises
    TaskFileError."""
    folder = Path(given or benchmark.name).expanduser().absolute()
    if not folder.is_dir():
        raise TaskFileError(f"{benchmark.name}: {folder} is no folder; {how_to_get(benchmark)}")
    return folder / "tasks" if (folder / "tasks").is_dir() else folder


def benchmark_defaults(names: Sequence[str], overrides: Sequence[str]) -> JsonObject:
    """Returns the settings of an evaluation of benchmarks alone, unless they are set: all tasks, answers as
    long as they may become, and greedy where there is one sample of each task."""
    samples = [text.partition("=")[2] for text in overrides if text.startswith("samples=")]
    known = [BENCHMARKS[name] for name in names if name in BENCHMARKS]
    if not known or len(known) < len(names):
        return {}
    longest = max(one.max_tokens for one in known)
    return {
        "tasks": ALL_TASKS,
        "max_tokens": longest,
        "max_context": longest + PROMPT_TOKENS,
        "timeout_s": 3600.0,
        "env_timeout_s": 1800.0,  # a grader is waited for, too
        **({"temperature": 0.0} if samples in ([], ["1"]) else {}),
    }


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
