"""Entries under `environments` of a training config, and the `config` of one that is a gym.

Owns: their keys, and which settings of a run do not go with a gym. Never touches: the gym's own files, starting it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from palestra.config.base import Config, File, Folder
from palestra.types.gym import is_gym
from palestra.util.json_types import JsonObject


class EnvironmentEntry(Config):
    """An environment of a run, and which tasks of it are played."""

    name: str
    """A registered environment, or `package.module:Class`, or `skyrl_gym:ID`; or `gym` (`gym:NAME`), which is played by
    the servers of a gym."""
    weight: PositiveFloat = 1.0
    """Share of the tasks, beside the other environments."""
    tasks: File | None = None
    """JSONL: one task in a line. Default: the environment's own."""
    eval_tasks: File | None = None
    """JSONL: held-out tasks, for evaluation. Default: the environment's own."""
    config: JsonObject = Field(default={})
    """`env_config` of the environment."""
    extras: JsonObject = Field(default={})
    """Added to each task's own."""
    max_turns: PositiveInt | None = None
    """None: the environment's own."""


class GymStart(Config):
    """A gym that a run starts for itself. Entries that say the same share it."""

    files: tuple[str, ...] = ()
    """As `palestra gym run -c` takes them, its model server included."""
    overrides: tuple[str, ...] = ()
    """KEY=VALUE, as on its command line."""
    search_dirs: tuple[Folder, ...] = ()
    """Folders to look for configs and servers in, before the others."""


class GymEntry(GymStart):
    head: str | None = Field(default=None, pattern=r"^https?://[^/\s]+/?$")
    """Address of a gym that runs already, in place of `files`. Its model server must ask this run's server for this
    run's alias."""
    agent: str | None = None
    """For rows without an `agent_ref`."""
    rows: str | None = None
    """`package.module:function`, which answers rows when called with "train" or "eval". In place of task files."""
    attempts: PositiveInt = 3
    """How often a rollout is tried whose server is lost, or fails."""

    @model_validator(mode="after")
    def _one_gym(self) -> GymEntry:
        if self.head is not None and (self.files or self.overrides or self.search_dirs):
            raise ValueError("either head, for a gym that runs, or files and overrides, for one to be started")
        if self.head is None and not self.files:
            raise ValueError("name the gym's YAML files (files), or the head of one that runs (head)")
        return self

    @property
    def start(self) -> GymStart:
        return GymStart(files=self.files, overrides=self.overrides, search_dirs=self.search_dirs)


def gym_entry(entry: EnvironmentEntry) -> GymEntry:
    """Raises ValueError, with the key."""
    try:
        return GymEntry.model_validate(entry.config)
    except ValidationError as error:
        found = error.errors()[0]
        where = ".".join(map(str, ("config", *found["loc"])))
        raise ValueError(f"environment {entry.name!r}: {where}: {found['msg'].removeprefix('Value error, ')}") from None


def check_gyms(environments: Sequence[EnvironmentEntry], rollouts: str, style: str) -> None:
    """Raises ValueError for what a gym would not do."""
    gyms = [entry for entry in environments if is_gym(entry.name)]
    for entry in gyms:
        gym_entry(entry)
        if entry.max_turns is not None:
            raise ValueError(f"environment {entry.name!r}: max_turns is its agent's to say, as max_steps in its files")
        try:
            json.dumps(entry.extras, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"environment {entry.name!r}: extras go into JSON rows, and cannot: {error}") from None
    if gyms and rollouts == "episodes":
        raise ValueError(f"{gyms[0].name!r} is played by its own servers, not as episodes; make rollouts local")
    if gyms and style == "batched":
        raise ValueError(f"rollout.style is batched: rollouts of {gyms[0].name!r} go at their own speed; make it async")
