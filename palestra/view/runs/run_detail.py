"""One run: its state, config, log, events and checkpoints."""

from __future__ import annotations

import os
import time
from pathlib import Path

from msgspec import Struct

from palestra.runs.advisories import Advisory, read_advisories
from palestra.runs.control import resume_command
from palestra.runs.facts import flatten
from palestra.runs.metric_table import MetricTable
from palestra.runs.reader import Part, RunNotFound, RunReader, RunStatus
from palestra.runs.record_files import RunError
from palestra.runs.saved_checkpoints import best_kept, list_checkpoints, selected_step, selection_text
from palestra.util.json_types import JsonObject
from palestra.view.runs.catalogue import Catalogue, ListedRun

LOG_LINES = 500
LOG_BYTES = 2 << 20  # how much of a log's end is looked at


class RunDetail(Struct, frozen=True):
    row: ListedRun
    path: str
    host: str | None
    command: str | None
    git_commit: str | None
    seconds: float
    attempts: int
    is_stopping: bool
    """Whether it was asked to end after its step."""
    resume: str | None
    """The command that goes on with it, if it has ended early."""
    selected: str | None
    """The step whose weights the run ended with, and why."""
    warnings: list[Advisory]
    rollout_steps: list[int]
    eval_steps: list[int]


class ConfigEntry(Struct, frozen=True):
    key: str
    value: object
    other: object = None
    differs: bool = False


class ConfigView(Struct, frozen=True):
    run: str
    against: str | None
    entries: list[ConfigEntry]
    facts: JsonObject


class LogTail(Struct, frozen=True):
    file: str | None
    files: list[str]
    lines: list[str]
    is_cut: bool
    """Whether the file has earlier lines."""


class ListedCheckpoint(Struct, frozen=True):
    name: str
    step: int
    address: str
    server: str | None
    scores: dict[str, float]
    is_best: bool
    is_selected: bool
    """Whether the run's name means it, in commands; False while the run goes on."""
    can_export: bool


def read_run(catalogue: Catalogue, name: str) -> RunDetail:
    run = catalogue.open(name)
    row, table = catalogue.row(run), catalogue.metrics(run)
    about, events = run.read_about(), run.read_events()
    facts = about.get("facts") or {}
    status = run.status()
    return RunDetail(
        row=row,
        path=str(run.path),
        host=facts.get("host"),
        command=facts.get("command"),
        git_commit=facts.get("git_commit"),
        seconds=_seconds(table, events, status),
        attempts=max(map(_attempt, events), default=1),
        is_stopping=run.is_asked_to_stop and status is RunStatus.RUNNING,
        resume=resume_command(run) if status.can_resume and "kind" in about else None,
        selected=_selected(run),
        warnings=read_advisories(run, table),
        rollout_steps=run.steps(Part.ROLLOUTS),
        eval_steps=run.steps(Part.EVAL),
    )


def read_config(catalogue: Catalogue, name: str, against: str | None = None) -> ConfigView:
    """The run's config as dotted keys, beside that of another run if one is named."""
    run = catalogue.open(name)
    about = run.read_about()
    mine = flatten(about.get("config") or {})
    if against is None:
        entries = [ConfigEntry(key, value) for key, value in mine.items()]
    else:
        other = flatten(catalogue.open(against).read_about().get("config") or {})
        keys = [*mine, *(key for key in other if key not in mine)]
        entries = [ConfigEntry(key, mine.get(key), other.get(key), mine.get(key) != other.get(key)) for key in keys]
    facts = {key: value for key, value in (about.get("facts") or {}).items() if key != "packages"}
    return ConfigView(name, against, entries, facts)


def read_log(catalogue: Catalogue, name: str, file: str | None = None, find: str = "") -> LogTail:
    """The last lines of a log of the run, or the last that have a text."""
    run = catalogue.open(name)
    files = {path.name: path for path in run.log_files()}
    if file is None:
        file = next(iter(files), None)
    elif file not in files:
        raise RunNotFound(f"run {name} has no log {file[:100]!r}; it has: {', '.join(files) or 'none'}")
    if file is None:
        return LogTail(None, [], [], False)
    text, is_cut = _end_of(files[file])
    lines = [line for line in text.splitlines() if find.lower() in line.lower()]
    return LogTail(file, list(files), lines[-LOG_LINES:], is_cut or len(lines) > LOG_LINES)


def read_events(catalogue: Catalogue, name: str) -> list[JsonObject]:
    """Reads what happened to the run, newest first."""
    return list(reversed(catalogue.open(name).read_events()))


def read_checkpoints(catalogue: Catalogue, name: str) -> list[ListedCheckpoint]:
    run = catalogue.open(name)
    if not (found := list_checkpoints(run)):
        return []
    best, selected = best_kept(run, found).step, selected_step(run, found)
    return [
        ListedCheckpoint(
            name=one.name,
            step=one.step,
            address=one.address,
            server=one.server,
            scores=one.scores,
            is_best=one.step == best,
            is_selected=one.step == selected,
            can_export=one.folder is not None,
        )
        for one in reversed(found)
    ]


def _selected(run: RunReader) -> str | None:
    """Reads the selected step from the summary, so that no checkpoint is read for every look at the page."""
    try:
        return selection_text(run.read_summary()["selected"])
    except (KeyError, TypeError, ValueError):  # it goes on, or is older, or the file was not written by us
        return None


def _seconds(table: MetricTable, events: list[JsonObject], status: RunStatus) -> float:
    """The time from the first to the last sign of each attempt, and until now while it runs."""
    signs: dict[int, list[float]] = {}
    for event in events:
        if isinstance(event.get("time"), int | float):
            signs.setdefault(_attempt(event), []).append(float(event["time"]))
    newest = max(signs, default=1)
    if status is RunStatus.RUNNING:
        signs.setdefault(newest, []).append(time.time())
    elif (last := table.last("time")) is not None:
        signs.setdefault(newest, []).append(last)
    return sum(max(times) - min(times) for times in signs.values())


def _attempt(event: JsonObject) -> int:
    number = event.get("attempt")
    return number if isinstance(number, int) else 1


def _end_of(file: Path) -> tuple[str, bool]:
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - LOG_BYTES))
            text = stream.read().decode("utf-8", "replace")
    except OSError as error:
        raise RunError(f"{file}: {error.strerror}") from error
    if size <= LOG_BYTES:
        return text, False
    return text.partition("\n")[2], True
