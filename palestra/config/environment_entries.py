"""Entries under `environments` of a training config, and the `config` of an entry that is a gym."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError, model_validator

from palestra.config.base import Config, Dataset, Folder
from palestra.types.gym import is_gym
from palestra.types.rollouts import CODING, is_verifiers
from palestra.util.json_types import JsonObject

PACKAGES = ("verifiers", "reasoning_gym", "textarena")
"""Packages whose environments have entries of their own: `{verifiers: NAME, args: {…}}` for `verifiers:NAME`."""
ARGUMENTS = ("args", "eval_args")
"""Keys of such an entry that are keys of its `config`."""


class JudgedReward(Config):
    """A reward from a judge, instead of the environment's own or beside it."""

    judge: str
    """Name of a judge in the section `judges`."""
    weight: PositiveFloat = 1.0
    """Weight of the judge's reward, which is between 0 and 1."""
    own_weight: NonNegativeFloat = 0.0
    """Weight of the reward that the environment itself gives."""


class EnvironmentEntry(Config):
    """An environment of a run, and which tasks of it are played."""

    name: str
    """A registered environment, or `package.module:Class`, or `skyrl_gym:ID`; or `gym` (`gym:NAME`), which is played by
    the servers of a gym; or `coding`, which agents play."""
    weight: PositiveFloat = 1.0
    """Weight of this environment's tasks beside those of the others."""
    tasks: Dataset | None = None
    """JSONL or Parquet file with one task per row; for `coding`, a folder of task folders. Default: the environment's
    own tasks."""
    eval_tasks: Dataset | None = None
    """The same with held-out tasks, for evaluation. Default: the environment's own."""
    shuffle: bool = True
    """Shuffle the tasks anew whenever all have been used. false: they are played in the order of the file, those of
    `coding` by the names of their folders."""
    config: JsonObject = Field(default={})
    """`env_config` of the environment."""
    extras: JsonObject = Field(default={})
    """Added to the `extras` of each task."""
    max_turns: PositiveInt | None = None
    """Maximum number of turns. None: the environment's own."""
    reward: JudgedReward | None = None
    """Lets a judge grade the rollouts. None: the environment's own rewards."""

    @model_validator(mode="before")
    @classmethod
    def _of_package(cls, given: Any) -> Any:
        """Reads `{reasoning_gym: chain_sum, args: …}` as the environment `reasoning_gym:chain_sum` with these args in
        its config."""
        named = [key for key in PACKAGES if isinstance(given, dict) and key in given]
        if not named:
            return given
        if len(named) > 1 or "name" in given:
            raise ValueError(f"give one of: name, {', '.join(PACKAGES)}")
        config = {**(given.get("config") or {}), **{key: given[key] for key in ARGUMENTS if key in given}}
        entry = {key: value for key, value in given.items() if key not in (*named, *ARGUMENTS)}
        return {**entry, "name": f"{named[0]}:{given[named[0]]}", "config": config}


class GymStart(Config):
    """A gym that a run starts for itself. Entries with equal settings share it."""

    files: tuple[str, ...] = ()
    """The gym's YAML files, as for `palestra gym run -c`, including its model server."""
    overrides: tuple[str, ...] = ()
    """Settings as KEY=VALUE, as on the command line of `palestra gym run`."""
    search_dirs: tuple[Folder, ...] = ()
    """Folders that are searched first for configs and servers."""


class GymEntry(GymStart):
    head: str | None = Field(default=None, pattern=r"^https?://[^/\s]+/?$")
    """Address of the head server of a running gym, instead of `files`. Its model server must sample from this run's
    server, with this run's alias as the model."""
    agent: str | None = None
    """Agent for rows without an `agent_ref`."""
    rows: str | None = None
    """`package.module:function`, which returns rows when called with "train" or "eval". Used instead of task files."""
    attempts: PositiveInt = 3
    """Attempts at a rollout whose server fails or is lost."""

    @model_validator(mode="after")
    def _one_gym(self) -> GymEntry:
        if self.head is not None and (self.files or self.overrides or self.search_dirs):
            raise ValueError("give either head, for a running gym, or files and overrides, for a gym to be started")
        if self.head is None and not self.files:
            raise ValueError("name the gym's YAML files (files), or the head server of a running gym (head)")
        return self

    @property
    def start(self) -> GymStart:
        return GymStart(files=self.files, overrides=self.overrides, search_dirs=self.search_dirs)


def gym_entry(entry: EnvironmentEntry) -> GymEntry:
    """The settings of an entry that is a gym. Raises ValueError, with the key."""
    try:
        return GymEntry.model_validate(entry.config)
    except ValidationError as error:
        found = error.errors()[0]
        where = ".".join(map(str, ("config", *found["loc"])))
        raise ValueError(f"environment {entry.name!r}: {where}: {found['msg'].removeprefix('Value error, ')}") from None


def check_gyms(environments: Sequence[EnvironmentEntry], rollouts: str, style: str) -> None:
    """Raises ValueError for settings that a gym does not support."""
    gyms = [entry for entry in environments if is_gym(entry.name)]
    for entry in gyms:
        gym_entry(entry)
        if entry.max_turns is not None:
            raise ValueError(
                f"environment {entry.name!r}: max_turns cannot be set here; the gym's agent "
                "limits turns by max_steps in its config"
            )
        try:
            json.dumps(entry.extras, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"environment {entry.name!r}: extras must be JSON, because they go into the rows of the gym: {error}"
            ) from None
    if gyms and rollouts != "local":
        raise ValueError(f"{gyms[0].name!r} is played by its own servers, not as episodes; set rollouts=local")
    if gyms and style == "batched":
        raise ValueError(
            f"rollouts of {gyms[0].name!r} cannot be batched, since each goes at its own speed; set rollout.style=async"
        )


def check_coding(environments: Sequence[EnvironmentEntry], rollouts: str) -> None:
    """Raises ValueError unless agents play coding tasks, and nothing else."""
    for entry in environments:
        if entry.name == CODING and rollouts != "agent":
            raise ValueError(f"environment {CODING!r} is played by an agent; set rollouts=agent")
        if entry.name != CODING and rollouts == "agent":
            raise ValueError(f"an agent plays the environment {CODING!r}, not {entry.name!r}; set rollouts=local")


def check_verifiers(environments: Sequence[EnvironmentEntry], rollouts: str) -> None:
    """Raises ValueError for settings that environments of verifiers do not support."""
    for entry in environments:
        if not is_verifiers(entry.name):
            continue
        if rollouts != "episodes":
            raise ValueError(f"{entry.name!r} is played as episodes at the server; set rollouts=episodes")
        if entry.max_turns is not None or entry.tasks is not None or entry.eval_tasks is not None:
            raise ValueError(
                f"environment {entry.name!r}: its tasks and turns are its own; give its arguments (args, eval_args) "
                "instead of tasks, eval_tasks and max_turns"
            )


def is_verifiers_entry(entry: object) -> bool:
    """Whether an entry, checked or as it was given, is an environment of verifiers."""
    if isinstance(entry, dict):
        return "verifiers" in entry or is_verifiers(str(entry.get("name")))
    return isinstance(entry, EnvironmentEntry) and is_verifiers(entry.name)
