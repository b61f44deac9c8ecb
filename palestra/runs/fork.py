"""Forking a run: a new run that goes on from a checkpoint of another one, with other settings."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from palestra.config import ConfigError
from palestra.config.train import RunConfig, load_train_config
from palestra.runs.names import free_name
from palestra.runs.reader import ENGINE, RunReader
from palestra.runs.record_files import RunError, write_json
from palestra.runs.run_state import read_state
from palestra.runs.saved_checkpoints import list_checkpoints
from palestra.runs.writer import RunFolder
from palestra.util.json_types import JsonObject


def plan_fork(parent: RunReader, step: int | None, overrides: Iterable[str], name: str | None) -> tuple[int, RunConfig]:
    """The step after which a new run goes on, by default that of the newest checkpoint (0 is the beginning), and its
    config. Raises RunError if there is no such checkpoint, or ConfigError."""
    saved = [one.step for one in list_checkpoints(parent)]
    if step is None:
        step = saved[-1] if saved else 0
    if step and step not in saved:
        have = f"there are those of the steps {', '.join(map(str, saved))}" if saved else "there is none"
        raise RunError(f"{parent.name} has no checkpoint of step {step}; {have}")
    theirs: JsonObject = parent.read_about()["config"]
    rank = theirs["model"]["rank"]
    name, overrides = name or free_name(parent.path.parent), [*overrides]
    config = load_train_config([], overrides, theirs | {"name": name, "runs": str(parent.path.parent)})
    if step and config.model.rank != rank:
        raise ConfigError(["model.rank: the adapter keeps its rank; another rank needs a run from the beginning"])
    if config.steps <= step:
        raise ConfigError([f"steps: with {config.steps} of them there is nothing left to do after step {step}"])
    if config.alias is not None and not any(text.startswith("alias=") for text in overrides):
        config = config.model_copy(update={"alias": name})
    return step, config


def make_fork(parent: RunReader, step: int, config: RunConfig) -> RunFolder:
    """Makes the folder of a planned run. Its record says whose it was: `facts.forked_from`. Raises RunError."""
    path = config.runs / (config.name or "")
    if (path / "config.json").exists():
        raise RunError(f"run {path.name!r} already exists in {path.parent}; give the new run another --name")
    _borrow(parent, step, path, config)
    facts: JsonObject = {"forked_from": {"run": parent.name, "step": step}}
    facts["tokenizer"] = parent.read_about()["facts"].get("tokenizer")
    return RunFolder.create(config.runs, config.name, config, facts)


def _borrow(parent: RunReader, step: int, path: Path, config: RunConfig) -> None:
    """Writes the pointer to the weights before the folder is that of a run: after a kill in between there is none
    yet."""
    path.mkdir(parents=True, exist_ok=True)
    if not step:
        return
    if config.server is None and not (path / ENGINE).is_symlink():
        (path / ENGINE).symlink_to(os.path.relpath((parent.path / ENGINE).resolve(), path))
    pointer = Path("checkpoints", f"step_{step:06d}.json")
    state = msgspec.structs.replace(read_state(parent.path / pointer), is_borrowed=True)
    (path / pointer).parent.mkdir(exist_ok=True)
    write_json(path / pointer, state)
