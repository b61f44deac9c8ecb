"""Findings of a sweep: the best setting with its spread over seeds, and how much each key matters.

A setting is as good as the mean of its runs' last values. Settings of which no run has failed come first, then those
that came furthest, so that one that was pruned early is not above one that went on.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from palestra.runs.best_step import is_loss
from palestra.sweeps.folder import Decision, MemberState, MemberStatus, SweepReader
from palestra.sweeps.halving import by_setting
from palestra.sweeps.settings import Setting, without_seed

MIN_RUNS = 4
"""Fewer say nothing about the importance of a key."""


class SettingResult(Struct, frozen=True, kw_only=True):
    """Runs that differ in their seed alone."""

    settings: Setting
    members: list[str]
    statuses: dict[str, int]
    """How many of its runs are in which state."""
    step: int | None
    """The step of the values: of the run that came least far."""
    mean: float | None
    """Mean of the runs' last values of the sweep's metric."""
    spread: float | None
    """Their standard deviation over seeds; None if there is one run."""
    lowest: float | None
    highest: float | None

    @property
    def is_whole(self) -> bool:
        return MemberStatus.FAILED not in self.statuses


class KeyImportance(Struct, frozen=True):
    """How much of the differences between runs a key explains by itself."""

    key: str
    share: float | None
    """The share of the variance, corrected for chance (epsilon squared); None if there are too few runs."""


class SweepFindings(Struct, frozen=True, kw_only=True):
    name: str
    metric: str
    is_running: bool
    statuses: dict[str, int]
    best: SettingResult | None
    settings: list[SettingResult]
    """The best first."""
    importance: list[KeyImportance]
    """The most important first."""
    importance_step: int | None
    """The step at which runs are compared for it: the last one that all have reached."""
    members: list[MemberState]
    decisions: list[Decision]


def find(sweep: SweepReader) -> SweepFindings:
    states, metric = sweep.states(), sweep.plan.metric
    settings = rank(states, metric)
    step, importance = importances(states)
    return SweepFindings(
        name=sweep.name,
        metric=metric,
        is_running=sweep.is_running,
        statuses=dict(Counter(state.status for state in states)),
        best=settings[0] if settings and settings[0].mean is not None else None,
        settings=settings,
        importance=importance,
        importance_step=step,
        members=states,
        decisions=sweep.decisions(),
    )


def rank(states: Sequence[MemberState], metric: str) -> list[SettingResult]:
    sign = -1.0 if is_loss(metric) else 1.0
    results = [_result(runs) for runs in by_setting(states).values()]

    def order(one: SettingResult) -> tuple[bool, int, float]:
        return one.is_whole, -1 if one.step is None else one.step, sign * (one.mean or 0.0)

    return sorted(results, key=order, reverse=True)


def _result(runs: Sequence[MemberState]) -> SettingResult:
    values = [run.last for run in runs if run.last is not None]
    return SettingResult(
        settings=without_seed(runs[0].settings),
        members=[run.name for run in runs],
        statuses=dict(Counter(run.status for run in runs)),
        step=min((max(run.values) for run in runs if run.values), default=None),
        mean=statistics.fmean(values) if values else None,
        spread=statistics.stdev(values) if len(values) > 1 else None,
        lowest=min(values, default=None),
        highest=max(values, default=None),
    )


def importances(states: Sequence[MemberState]) -> tuple[int | None, list[KeyImportance]]:
    """Returns importances by the values at the last step that all runs with any values have reached."""
    runs = [state for state in states if state.values]
    common = set.intersection(*(set(run.values) for run in runs)) if runs else set()
    if not common:
        return None, []
    step = max(common)
    values = [run.values[step] for run in runs]
    keys = list(runs[0].settings)
    found = [KeyImportance(key, _explained([run.settings[key] for run in runs], values)) for key in keys]
    return step, sorted(found, key=lambda one: -1.0 if one.share is None else one.share, reverse=True)


def _explained(settings: Sequence[Any], values: Sequence[float]) -> float | None:
    """Epsilon squared: the share of the variance between groups of equal settings, less what chance would give."""
    groups = _grouped(settings, values)
    count, degrees = len(values), len(groups) - 1
    if count < MIN_RUNS or degrees < 1 or count - degrees - 1 < 1:
        return None
    mean = statistics.fmean(values)
    total = sum((value - mean) ** 2 for value in values)
    within = sum((value - statistics.fmean(group)) ** 2 for group in groups for value in group)
    if not total:
        return 0.0
    by_chance = degrees * within / (count - degrees - 1)
    return max(0.0, (total - within - by_chance) / total)


def _grouped(settings: Sequence[Any], values: Sequence[float]) -> list[list[float]]:
    """Values by setting; where nearly each run has a number of its own, as drawn ones do, by thirds of the numbers."""
    groups: dict[str, list[float]] = {}
    for setting, value in zip(settings, values, strict=True):
        groups.setdefault(str(setting), []).append(value)
    if len(groups) <= len(values) / 2 or not all(isinstance(one, int | float) for one in settings):
        return list(groups.values())
    ordered = [value for _, value in sorted(zip(settings, values, strict=True), key=lambda pair: pair[0])]
    cuts = [round(len(ordered) * part / 3) for part in range(4)]
    return [ordered[low:high] for low, high in itertools.pairwise(cuts) if high > low]
