"""What a run's curves ask somebody to look at.

Owns: the rules. Never touches: what is done about it.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from msgspec import Struct

from palestra.runs.metric_table import MetricTable
from palestra.runs.reader import RunStatus

RECENT = 5
LATE = 5.0  # times the usual time of a step
LATE_S = 120.0
LOW_DISK = 0.03
STALL_STEPS = 30


class RunWarning(Struct, frozen=True):
    metric: str | None
    text: str


def find_warnings(table: MetricTable, status: RunStatus, folder: Path) -> list[RunWarning]:
    found = [*_of_metrics(table)]
    if status is RunStatus.RUNNING:
        found += [*_of_progress(table), *_of_disk(folder)]
    return found


def _of_metrics(table: MetricTable) -> list[RunWarning]:
    found = []

    def warn(metric: str, is_wrong: bool, text: str) -> None:
        if is_wrong:
            found.append(RunWarning(metric, text))

    if last := recent(table, "mismatch/not_finite"):
        warn("mismatch/not_finite", last[-1] > 0, "Some log-probabilities are no numbers: the model is broken.")
    if last := recent(table, "kl/sampler_trainer_k3"):
        warn("kl/sampler_trainer_k3", median(last) > 0.05, "Sampler and trainer disagree: their KL is above 0.05.")
    if last := recent(table, "rollouts/zero_variance_share"):
        text = "Most groups teach nothing: their rewards are all equal. The tasks are too easy or too hard."
        warn("rollouts/zero_variance_share", min(last) > 0.8, text)
    if last := recent(table, "rollouts/truncated_share"):
        warn("rollouts/truncated_share", min(last) > 0.3, "Many answers are cut at the token limit.")
    failed, total = recent(table, "rollouts/failed"), recent(table, "rollouts/total")
    if failed and total:
        share = sum(failed) / max(1.0, sum(total))
        warn("rollouts/failed", share > 0.05, f"{share:.0%} of the last rollouts failed; read their errors.")
    if last := recent(table, "policy/entropy_estimate"):
        best = table.last("reward/mean")
        text = "The entropy is near 0 while the reward is low: exploration is over before anything was found."
        warn("policy/entropy_estimate", max(last) < 0.02 and best is not None and best < 0.5, text)
    rewards = recent(table, "reward/mean", 2 * STALL_STEPS)
    if len(rewards) == 2 * STALL_STEPS:
        before, after = rewards[:STALL_STEPS], rewards[STALL_STEPS:]
        is_stalled = max(after) < 0.95 and sum(after) <= sum(before)
        warn("reward/mean", is_stalled, f"The reward has not risen for {STALL_STEPS} steps.")
    return found


def _of_progress(table: MetricTable) -> list[RunWarning]:
    usual, last = recent(table, "time/total_s", 20), table.last("time")
    if last is None:
        return []
    silent_s = time.time() - last
    if silent_s > max(LATE_S, LATE * (median(usual) if usual else 0.0)):
        return [RunWarning(None, f"No step for {silent_s / 60:.0f} minutes.")]
    return []


def _of_disk(folder: Path) -> list[RunWarning]:
    try:
        disk = shutil.disk_usage(folder)
    except OSError:
        return []
    if disk.free < LOW_DISK * disk.total:
        return [RunWarning(None, f"The disk is almost full: {disk.free / 2**30:.1f} GiB are free.")]
    return []


def recent(table: MetricTable, name: str, count: int = RECENT) -> Sequence[float]:
    return [value for value in table.columns.get(name, ())[-count:] if not math.isnan(value)]
