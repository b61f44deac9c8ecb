"""Reading a run's files, while its trainer runs or long after."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from msgspec import Struct

from palestra.runs.labels import RunLabels, read_labels
from palestra.runs.lock import read_holder
from palestra.runs.metric_table import is_evaluation
from palestra.runs.record_files import RunError, read_json, read_lines, read_records
from palestra.runs.rollout_records import RolloutRecord, TokenRecord
from palestra.util.json_types import JsonObject
from palestra.util.renamed import with_new_keys
from palestra.util.suggest import nearest

Row = JsonObject
STEP_FILE = re.compile(r"step_(\d+)\.jsonl\.zst")
STOP = "stop.json"
"""File by which a run is asked to end after its step."""
ENGINE = "engine"
"""Folder within a run's, with the state of its own server; a link to the sweep's, if it is one of a sweep."""
IMITATION = "imitation"
"""Folder within a run's, with the run of its imitation."""


class RunNotFound(RunError, LookupError):
    """There is no such run, or it has no such part."""


class RunStatus(StrEnum):
    """The state of a run."""

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    """Stopped in good order by a user or an early stop."""
    FAILED = "failed"
    KILLED = "killed"
    """The process has ended without saying so: the last event says that it runs."""

    @property
    def can_resume(self) -> bool:
        return self in (RunStatus.STOPPED, RunStatus.FAILED, RunStatus.KILLED)


class Part(StrEnum):
    """Folders of a run that have a file for each step."""

    ROLLOUTS = "rollouts"
    EVAL = "eval"
    TOKENS = "tokens"


class FoundRollout(Struct):
    """A rollout of a run, and where it was found."""

    run: str
    part: Part
    step: int
    record: Row


class RunReader:
    """Reads the folder of a training run. Raises RunNotFound if it is not one."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()
        if not self.config_file.is_file():
            raise RunNotFound(f"{self.path} is not a run: it has no config.json")

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def lock_file(self) -> Path:
        return self.path / "lock"

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether the run was asked to end after its step."""
        return (self.path / STOP).exists()

    def read_labels(self) -> RunLabels:
        """Reads the run's tags and notes."""
        return read_labels(self.path)

    def step_file(self, part: Part, step: int) -> Path:
        return self.path / part / f"step_{step:06d}.jsonl.zst"

    def read_about(self) -> Row:
        """`config` as the run had it, `facts` about where it ran, `created`, `kind`."""
        about = read_json(self.config_file)
        if not isinstance(about, dict) or not all(
            isinstance(about.get(part) or {}, dict) for part in ("config", "facts")
        ):
            raise RunError(f"{self.config_file}: not the config of a run")
        return {**about, "config": with_new_keys(about["config"])} if "config" in about else about

    def read_summary(self) -> Row:
        return read_json(self.summary_file) if self.summary_file.is_file() else {}

    def read_events(self) -> list[Row]:
        return read_lines(self.events_file)

    def status(self) -> RunStatus:
        summary = self.read_summary()
        try:
            recorded = RunStatus(summary.get("status", RunStatus.RUNNING))
        except (ValueError, AttributeError):
            raise RunError(f"{self.summary_file}: not the summary of a run") from None
        holder = read_holder(self.lock_file)
        if holder is not None and holder.is_alive:
            return RunStatus.RUNNING
        return RunStatus.KILLED if recorded is RunStatus.RUNNING else recorded

    def read_metrics(self) -> list[Row]:
        """One row for each step, in order. A resumed run repeats the steps since its checkpoint: from the first step
        of a later attempt on, what earlier ones wrote no longer counts, but for the step that it only evaluates. Rows
        of one attempt and step are joined."""
        rows: dict[int, Row] = {}
        attempt = None
        for row in read_lines(self.metrics_file):
            step = row.get("step")
            if not isinstance(step, int):
                continue
            if row.get("attempt") != attempt:
                attempt = row.get("attempt")
                kept = step + is_evaluation(row)
                rows = {known: old for known, old in rows.items() if known < kept}
            rows[step] = {**rows.get(step, {}), **row}
        return [rows[step] for step in sorted(rows)]

    def steps(self, part: Part = Part.ROLLOUTS) -> list[int]:
        """The steps that have a file."""
        try:
            with os.scandir(self.path / part) as entries:
                names = [STEP_FILE.fullmatch(entry.name) for entry in entries if self._is_own(entry)]
        except OSError:
            return []
        return sorted(int(name[1]) for name in names if name)

    def _is_own(self, entry: os.DirEntry[str]) -> bool:
        """Whether a file of a step belongs to the run."""
        return True

    def read_rollouts(self, step: int, part: Part = Part.ROLLOUTS) -> list[RolloutRecord]:
        return list(read_records(self._existing(part, step)))

    def read_tokens(self, step: int) -> list[TokenRecord]:
        return list(read_records(self._existing(Part.TOKENS, step)))

    def find_rollouts(self, rollout_id: str, *, prefix: bool = False) -> Iterator[FoundRollout]:
        """The rollouts with this id, newest first; with `prefix`, those whose id begins with it."""
        for part in (Part.ROLLOUTS, Part.EVAL):
            for step in reversed(self.steps(part)):
                for record in read_records(self.step_file(part, step), rollout_id):
                    known = record.get("id", "")
                    if known == rollout_id or (prefix and known.startswith(rollout_id)):
                        yield FoundRollout(self.name, part, step, record)

    def find_rollout(self, rollout_id: str) -> FoundRollout | None:
        return next(self.find_rollouts(rollout_id), None)

    def find_tokens(self, rollout_id: str, step: int) -> TokenRecord | None:
        file = self.step_file(Part.TOKENS, step)
        if not file.is_file():
            return None
        return next((row for row in read_records(file, rollout_id) if row.get("id") == rollout_id), None)

    def _existing(self, part: Part, step: int) -> Path:
        file = self.step_file(part, step)
        if not file.is_file():
            have = self.steps(part)
            known = f"there are steps {have[0]} to {have[-1]}" if have else "there are none yet"
            raise RunNotFound(f"run {self.name} has no {part} of step {step}; {known}")
        return file


def list_runs(root: Path) -> list[RunReader]:
    """The runs of a folder, newest first. What is no run, or was deleted meanwhile, is left out."""
    found: list[tuple[float, RunReader]] = []
    for file in root.glob("*/config.json"):
        try:
            found.append((file.stat().st_mtime, RunReader(file.parent)))
        except (OSError, RunNotFound):
            continue
    return [run for _, run in sorted(found, key=lambda pair: pair[0], reverse=True)]


def find_run(which: str, root: Path) -> RunReader:
    """A name in `root`, or a path."""
    for path in (root / which, Path(which)):
        if (path / "config.json").is_file():
            return RunReader(path)
    names = [run.name for run in list_runs(root)]
    near = nearest(which, names)
    hint = f" (did you mean {near!r}?)" if near else ""
    raise RunNotFound(f"no run {which!r} in {root}{hint}; to see all: palestra run list --runs {root}")
