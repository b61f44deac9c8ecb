"""Advisories: what the metrics of a run say is going wrong, what usually causes it, and the setting to try.

`palestra train`, `palestra run show` and the dashboard share them. Rules look at the newest steps of a table that reads
only what was added to the file, so that a run in training can apply all of them after every step.
"""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from statistics import median

from msgspec import Struct

from palestra.runs.advisory_guidance import GUIDANCE, AdvisoryKind, K
from palestra.runs.advisory_rules import RULES, Curves, Finding
from palestra.runs.metric_table import MetricTable
from palestra.runs.reader import RunReader, RunStatus
from palestra.runs.writer import EventKind, RunFolder
from palestra.util.figures import number_text
from palestra.util.json_types import JsonObject

LATE, LATE_S = 5.0, 120.0
"""A step is late after this many times its usual time, and this many seconds at least."""
LOW_DISK = 0.03
KEY = re.compile(r"`([a-z_.]+)`")
COVERED_BY: dict[AdvisoryKind, set[AdvisoryKind]] = {
    K.EVALUATION_FELL: {K.REWARD_WITHOUT_EVALUATION},
    K.MISMATCH: {K.SEVERE_MISMATCH},
    K.ZERO_VARIANCE: {K.NOTHING_TO_TRAIN},
    K.FEW_INFORMATIVE_GROUPS: {K.NOTHING_TO_TRAIN, K.ZERO_VARIANCE},
    K.ENTROPY_FALLING: {K.ENTROPY_NEAR_ZERO},
}
"""An advisory is left out beside one that says the same and more."""


class Advisory(Struct, frozen=True):
    kind: AdvisoryKind
    metric: str | None
    value: float
    """The metric's value; without a metric, what was measured instead."""
    step: int | None
    """The step at which it was seen."""
    text: str
    """What is seen."""
    cause: str
    """What usually causes it."""
    remedy: str
    """What to try, with the present values of the settings that it names."""
    settings: list[str]
    """Those settings, as dotted keys of the config."""

    @property
    def message(self) -> str:
        """All of it in a line."""
        return f"{self.observation}. Usual cause: {self.cause}. Try: {self.remedy}."

    @property
    def observation(self) -> str:
        """The observation, with the metric and its value."""
        return f"{self.text} ({self.metric} {number_text(self.value)})" if self.metric else self.text

    @property
    def warning(self) -> str:
        """The line that a run in training prints."""
        return f"warning after step {self.step}: {self.message}"


def find_advisories(table: MetricTable, config: JsonObject) -> list[Advisory]:
    """Returns what is wrong with a run at its newest step, the most urgent first. `config` is the run's, as
    `config.json` has it."""
    if not table.steps:
        return []
    curves = Curves(table, config)
    found = {kind: finding for kind, rule in RULES.items() if (finding := rule(curves)) is not None}
    return [
        _advisory(kind, finding, curves)
        for kind, finding in found.items()
        if not COVERED_BY.get(kind, set()) & {*found}
    ]


def read_advisories(run: RunReader, table: MetricTable) -> list[Advisory]:
    """The advisories of a run by its metrics, whether it has ended or not; while it runs, also whether it still goes on
    and has disk space."""
    config = run.read_about().get("config") or {}
    found = find_advisories(table, config)
    if run.status() is RunStatus.RUNNING:
        now = {K.NO_PROGRESS: _late_step(table), K.LOW_DISK: _low_disk(run.path)}
        curves = Curves(table, config)
        found += [_advisory(kind, finding, curves) for kind, finding in now.items() if finding is not None]
    return found


class RunAdvisor:
    """The advisories of a run in training."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._table = run, MetricTable(run.metrics_file)
        self._config: JsonObject = run.read_about()["config"]
        self._known: set[AdvisoryKind] = set()

    def take_new(self) -> list[Advisory]:
        """Returns advisories of kinds that this attempt of the run had not yet, and records them as events."""
        self._table.refresh()
        new = [one for one in find_advisories(self._table, self._config) if one.kind not in self._known]
        for one in new:
            self._known.add(one.kind)
            facts = {"step": one.step, "advisory": one.kind, "metric": one.metric, "value": one.value}
            self._run.event(EventKind.WARNING, **facts, message=one.message)
        return new


def _late_step(table: MetricTable) -> Finding | None:
    last = table.last("time")
    if last is None:
        return None
    silent_s, usual = time.time() - last, Curves(table, {}).recent("time/total_s", 20)
    if silent_s <= max(LATE_S, LATE * (median(usual) if usual else 0.0)):
        return None
    return Finding(None, silent_s, f"No step for {silent_s / 60:.0f} minutes")


def _low_disk(folder: Path) -> Finding | None:
    try:
        disk = shutil.disk_usage(folder)
    except OSError:
        return None
    if disk.free >= LOW_DISK * disk.total:
        return None
    return Finding(None, disk.free, f"The disk is almost full: {disk.free / 2**30:.1f} GiB are free")


def _advisory(kind: AdvisoryKind, finding: Finding, curves: Curves) -> Advisory:
    cause, remedy = finding.guidance or GUIDANCE[kind]
    settings = KEY.findall(remedy)
    for key in settings:
        value = curves.setting(key)
        if isinstance(value, str | int | float):
            text = str(value).lower() if isinstance(value, bool) else number_text(value)
            remedy = remedy.replace(f"(`{key}`)", f"({key}, now {text})").replace(f"`{key}`", f"{key} (now {text})")
    step = finding.step if finding.step is not None else next(iter(curves.table.steps[-1:]), None)
    remedy = remedy.replace("`", "").replace("--step N", f"--step {step}")
    return Advisory(kind, finding.metric, finding.value, step, finding.text, cause, remedy, settings)
