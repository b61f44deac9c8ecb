"""Sweeps on disk without anybody training: plans, and runs that say what they have reached."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra.config.sweep import SweepConfig
from palestra.config.train import load_train_config
from palestra.runs.reader import RunStatus
from palestra.runs.writer import RunFolder
from palestra.sweeps.folder import SweepFolder, SweepPlan
from palestra.sweeps.planning import plan_sweep

STEPS = ("steps=8", "eval.every=1")


def plan(folder: Path, vary: Mapping[str, Any], **settings: Any) -> SweepPlan:
    sweep = SweepConfig.model_validate({"config": "arithmetic", "name": "pop", "vary": vary, **settings})
    return plan_sweep(sweep, [], ["environments=[{name: arithmetic}]", f"runs={folder}", *STEPS])


def create(folder: Path, vary: Mapping[str, Any], **settings: Any) -> SweepFolder:
    return SweepFolder.create(folder, plan(folder, vary, **settings))


def play(sweep: SweepFolder, member: int, values: Mapping[int, float], status: RunStatus | None = None) -> None:
    """A run with these values of the metric by step; it was cut there, unless it has ended with `status`."""
    planned = sweep.plan.members[member]
    path = sweep.member_path(planned.name)
    config = load_train_config([], [], planned.config)
    is_new = not (path / "config.json").exists()
    with RunFolder.create(path.parent, planned.name, config) if is_new else RunFolder.open(path) as run:
        for step, value in values.items():
            run.write_metrics(step, {sweep.plan.metric: value})
        if status is not None:
            run.finish(status, **({"error": "it went wrong"} if status is RunStatus.FAILED else {}))
