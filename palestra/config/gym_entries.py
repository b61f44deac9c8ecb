"""`config` of an environment entry that is a gym.

Owns: its keys, and which settings of a run do not go with a gym. Never touches: the gym's own files, starting it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pydantic import Field, PositiveInt, ValidationError, model_validator

from palestra.config.base import Config, Folder
from palestra.types.gym import is_gym

if TYPE_CHECKING:
    from palestra.config.train import EnvironmentEntry, GrpoConfig


class GymStart(Config):
    """A gym that a run starts for itself. Entries that say the same share it."""

    files: tuple[str, ...] = ()
    """As `palestra gym run -c` takes them, its model server included."""
    overrides: tuple[str, ...] = ()
    """KEY=VALUE, as on its command line."""
    search_dirs: tuple[Folder, ...] = ()


class GymEntry(GymStart):
    head: str | None = Field(default=None, pattern=r"^https?://[^/\s]+/?$")
    """Of a gym that runs already, in place of `files`. Its model server must ask this run's server for this run's
    alias."""
    agent: str | None = None
    """For rows without an `agent_ref`."""
    rows: str | None = None
    """`package.module:function`, which answers rows when called with "train" or "eval". In place of task files."""
    attempts: PositiveInt = 3
    """Of a rollout whose server is lost, or fails."""

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


def check_gyms(config: GrpoConfig) -> None:
    """Raises ValueError for what a gym would not do."""
    gyms = [entry for entry in config.environments if is_gym(entry.name)]
    for entry in gyms:
        gym_entry(entry)
        if entry.max_turns is not None:
            raise ValueError(f"environment {entry.name!r}: max_turns is its agent's to say, as max_steps in its files")
        try:
            json.dumps(entry.extras, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"environment {entry.name!r}: extras go into JSON rows, and cannot: {error}") from None
    if gyms and config.rollouts == "episodes":
        raise ValueError(f"{gyms[0].name!r} is played by its own servers, not as episodes; make rollouts local")
    if gyms and config.rollout.style == "batched":
        raise ValueError(f"rollout.style is batched: rollouts of {gyms[0].name!r} go at their own speed; make it async")
