"""Makes the whole config of each run from the config of a sweep."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

from palestra.config import ConfigError, dump_config
from palestra.config.load import Override
from palestra.config.sweep import SweepConfig
from palestra.config.train import RunConfig, load_train_config
from palestra.runs.names import free_name
from palestra.sweeps.evolution import compared_steps
from palestra.sweeps.folder import PlannedMember, SweepPlan, member_name
from palestra.sweeps.halving import eval_every
from palestra.sweeps.settings import Setting, expand, setting_text
from palestra.util.json_types import JsonObject

SHARED = ("server", "runs", "model.name", "model.device", "model.weights")
"""Keys that all runs of a sweep have in common, since they share a server and a folder."""

TRAINING_METRICS = {"sft": "loss/mean", "dpo": "dpo/accuracy"}
"""Metrics by the kind of run; all other kinds have a reward."""


def plan_sweep(sweep: SweepConfig, files: Sequence[str | Path], overrides: Sequence[str] = ()) -> SweepPlan:
    """Plans the runs, each with its whole config. `files` and `overrides` are those of all runs; the sweep's own
    settings come after them. Raises ConfigError if a config is not valid, or if the runs cannot be compared."""
    if shared := [key for key in SHARED if key in sweep.vary]:
        raise ConfigError([f"{shared[0]} cannot be varied: the runs of a sweep share a server and a folder"])
    fixed = [*overrides, *(Override(key, value, f"{key}={value}") for key, value in sweep.set.items())]
    settings = expand(sweep.vary, sweep.sample, sweep.sample_seed)
    configs = [load_train_config(files, [*fixed, *_overrides(setting)]) for setting in settings]
    name = sweep.name or free_name(configs[0].runs)
    members = []
    for index, (setting, config) in enumerate(zip(settings, configs, strict=True)):
        member = member_name(name, index, len(settings))
        own = {"name": member, "alias": member if config.alias is not None else None}
        members.append(PlannedMember(member, setting, json.loads(dump_config(config.model_copy(update=own)))))
    metric = sweep.metric or default_metric(members[0].config)
    if len({tuple(compared_steps(sweep, one.config)) for one in members}) > 1:
        raise ConfigError(["runs are compared at the same steps, so steps and eval.every cannot be varied"])
    plain = sweep.model_dump(mode="json")
    return SweepPlan(name=name, created=time.time(), sweep=plain, metric=metric, members=members)


def _overrides(setting: Setting) -> list[Override]:
    return [Override(key, value, setting_text({key: value})) for key, value in setting.items()]


def default_metric(config: JsonObject) -> str:
    """Returns the metric by which runs of this config are compared: of evaluations if there are any, else of training
    steps."""
    kept_by = config["checkpoint"]["keep_best"]
    is_evaluated = eval_every(config) > 0 and (config["kind"] != "sft" or config["eval_data"] is not None)
    return kept_by if kept_by is not None and is_evaluated else TRAINING_METRICS.get(config["kind"], "reward/mean")


def load_member(member: PlannedMember) -> RunConfig:
    """The config of a run with its present settings."""
    return load_train_config([], _overrides(member.settings), deepcopy(member.config))
