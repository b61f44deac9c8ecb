"""The runs of a folder: found by name, listed in rows, with what was read kept until their files change."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from palestra.runs.metric_table import MetricTable
from palestra.runs.overview import overview
from palestra.runs.reader import RunReader, RunStatus
from palestra.runs.record_files import RunError
from palestra.util.json_types import JsonObject
from palestra.view.runs.run_folders import RunFolders, ShownRun
from palestra.view.runs.run_index import FILE, RunIndex

STAR = "star"
"""The tag of starred runs."""
CURVE_POINTS = 60
CURVES = ("reward/mean", "eval/success", "loss/mean", "eval/loss")
MAX_TABLES = 64
TABLE_BYTES = 64 << 20  # one of 100 metrics and 10,000 steps takes 8 MB
SAVE_BYTES = 1 << 20  # what is added to a file until its metrics are saved again; shorter ones are read in 10 ms
WATCHED = ("config.json", "metrics.jsonl", "summary.json", "labels.jsonl", "lock")
Fingerprint = tuple[int, ...]


class ListedRun(Struct, frozen=True):
    """A run in the list of runs."""

    name: str
    status: str
    kind: str | None
    model: str | None
    environments: list[str]
    created: float | None
    last_step: int | None
    steps: int | None
    reward_mean: float | None
    eval_success: float | None
    eval_loss: float | None
    eval_step: int | None
    tags: list[str]
    notes: list[JsonObject]
    is_starred: bool
    curve_name: str | None
    """The metric of `curve`: the first of reward, evaluation and loss that the run has."""
    curve: list[float]
    error: str | None = None
    """Why the run cannot be read."""


def _evaluation(row: ListedRun) -> tuple[bool, float] | None:
    """Success, or the loss, of which less is better, apart from it."""
    if row.eval_success is not None:
        return True, row.eval_success
    return None if row.eval_loss is None else (False, -row.eval_loss)


SORTS: dict[str, Callable[[ListedRun], Any]] = {
    "name": lambda row: row.name.lower(),
    "state": lambda row: row.status,
    "step": lambda row: row.last_step,
    "reward": lambda row: row.reward_mean,
    "evaluation": _evaluation,
    "model": lambda row: row.model,
    "environment": lambda row: ", ".join(row.environments) or None,
    "started": lambda row: row.created,
}
"""Columns by which the list of runs is sorted."""


class RunPage(Struct, frozen=True):
    """A part of the list of runs, newest first."""

    runs: list[ListedRun]
    total: int
    """How many runs fit the filter."""
    all: int


class Catalogue:
    def __init__(self, root: Path, most_table_bytes: int = TABLE_BYTES) -> None:
        self.root = root.expanduser().absolute()
        self._folders = RunFolders(self.root)
        self._rows: dict[str, tuple[Fingerprint, ListedRun]] = {}
        self._tables: OrderedDict[Path, MetricTable] = OrderedDict()
        self._most_bytes = most_table_bytes
        self._saved: dict[Path, int] = {}
        """How much of each run's metrics the index has."""
        self._lock = threading.Lock()
        """Protects the tables: requests are answered in threads."""

    def open(self, name: str) -> ShownRun:
        """The run of this name. Raises RunNotFound; neither a name nor a link leads out of the folder."""
        return self._folders.open(name)

    def all(self) -> list[ShownRun]:
        """All runs, newest first."""
        return self._folders.list()

    def metrics(self, run: RunReader) -> MetricTable:
        """The run's metrics as they are now, in a table that later calls leave as it is."""
        with self._lock:
            known = self._tables.pop(run.path, None) or self._restore(run)
            table = known.updated()
            self._tables[run.path] = table
            while len(self._tables) > MAX_TABLES or (len(self._tables) > 1 and self._table_bytes > self._most_bytes):
                self._tables.popitem(last=False)
        if self._has_index and abs(table.offset - self._saved.get(run.path, 0)) >= SAVE_BYTES:
            self._saved[run.path] = table.offset
            with suppress(OSError):  # it was deleted meanwhile
                self._index.store_metrics(run.name, table.saved())
        return table

    @property
    def _table_bytes(self) -> int:
        return sum(table.size_bytes for table in self._tables.values())

    def _restore(self, run: RunReader) -> MetricTable:
        saved = self._index.load_metrics(run.name) if self._has_index else None
        if saved is None:
            return MetricTable(run.metrics_file)
        table = MetricTable.restore(run.metrics_file, saved)
        self._saved[run.path] = table.offset
        return table

    def find(self, text: str = "", limit: int = 200, offset: int = 0, sort: str = "") -> RunPage:
        """The runs that fit a filter. `sort` is one of SORTS, with a "-" before it the other way round; without one,
        starred runs come first, then the newest."""
        runs = self._folders.list()
        index = self._index
        known = dict(self._rows)
        rows = [self.row(run) for run in runs]
        now = {run.name: self._rows.get(run.name) for run in runs}
        new = {name: entry for name, entry in now.items() if entry is not None and entry is not known.get(name)}
        index.store({name: (found, msgspec.json.encode(row)) for name, (found, row) in new.items()})
        self._forget(known.keys() - {run.name for run in runs})
        found = [row for row in rows if fits(row, text)]
        if (column := sort.removeprefix("-")) in SORTS:
            found = sorted_by(found, column, is_falling=sort.startswith("-"))
        else:
            found.sort(key=lambda row: row.is_starred, reverse=True)  # stable: each part stays newest first
        return RunPage(found[offset : offset + limit], len(found), len(rows))

    def _forget(self, gone: Set[str]) -> None:
        """Runs that were deleted."""
        if gone:
            self._index.forget(gone)
        for name in gone:
            self._rows.pop(name, None)
            self._saved.pop(self.root / name, None)

    @property
    def _has_index(self) -> bool:
        """Made with the first list: who only looks at one run leaves no file behind."""
        return "_index" in vars(self) or (self.root / FILE).exists()

    @cached_property
    def _index(self) -> RunIndex:
        index = RunIndex(self.root)
        decoded = {name: (known, _decode(row)) for name, (known, row) in index.load().items()}
        kept: dict[str, tuple[Fingerprint, ListedRun]] = {
            name: (known, row) for name, (known, row) in decoded.items() if row is not None
        }
        self._rows = kept | self._rows
        return index

    def row(self, run: RunReader) -> ListedRun:
        print_now = _fingerprint(run.path)
        known = self._rows.get(run.name)
        if known is None or known[0] != print_now or known[1].status == RunStatus.RUNNING:
            read = (print_now, self._read_row(run))
            if known is None or read != known:  # the index stores what is new here
                self._rows[run.name] = known = read
        return known[1]

    def _read_row(self, run: RunReader) -> ListedRun:
        environments: list[str] = []
        curve_name, curve = None, []
        table = None
        try:
            table = self.metrics(run)
            config = run.read_about().get("config") or {}
            entries = [entry for entry in config.get("environments") or [] if isinstance(entry, dict)]
            environments = [str(entry["name"]) for entry in entries if "name" in entry]
            curve_name = next((name for name in CURVES if table.last(name) is not None), None)
            curve = _curve(table, curve_name) if curve_name else []
        except (RunError, AttributeError, TypeError):
            pass  # the overview says what is wrong
        row = overview(run, table)
        known: JsonObject = {name: row.get(name) for name in ListedRun.__struct_fields__ if name in row}
        known |= {"environments": environments, "is_starred": STAR in row["tags"]}
        known |= {"curve_name": curve_name, "curve": curve}
        try:
            return msgspec.convert(known, ListedRun)
        except msgspec.ValidationError as error:
            known = dict.fromkeys(known) | {"name": run.name, "status": "damaged", "tags": [], "notes": []}
            known |= {"environments": environments, "is_starred": False, "curve": curve}
            return msgspec.convert({**known, "error": f"{run.config_file}: {error}"}, ListedRun)


def sorted_by(rows: Sequence[ListedRun], column: str, *, is_falling: bool) -> list[ListedRun]:
    """The rows by a column of SORTS; those that have no value there come last either way."""
    value = SORTS[column]
    known = [row for row in rows if value(row) is not None]
    return sorted(known, key=value, reverse=is_falling) + [row for row in rows if value(row) is None]


def fits(row: ListedRun, text: str) -> bool:
    """Whether a run has every word of the filter: in its name, kind, model, environments, tags or notes; `tag:x`,
    `state:x` and `model:x` look there alone."""
    facts = {
        "name": row.name,
        "state": row.status,
        "kind": row.kind or "",
        "model": row.model or "",
        "env": " ".join(row.environments),
        "tag": " ".join(row.tags),
        "note": " ".join(str(note["text"]) for note in row.notes),
    }
    everything = " ".join(facts.values()).lower()
    for word in text.lower().split():
        where, colon, what = word.partition(":")
        known = colon and where in facts
        if (what not in facts[where].lower()) if known else (word not in everything):
            return False
    return True


def _decode(row: bytes) -> ListedRun | None:
    """A row of the index; None if it is none, such as one with a number that JSON does not have."""
    try:
        return msgspec.json.decode(row, type=ListedRun)
    except (msgspec.DecodeError, TypeError):
        return None


def _curve(table: MetricTable, name: str) -> list[float]:
    """A metric in few points, each the mean of its neighbours."""
    values = [value for value in table.columns[name] if value == value]
    bins = min(CURVE_POINTS, len(values))
    cuts = [round(i * len(values) / bins) for i in range(bins + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]


def _fingerprint(path: Path) -> Fingerprint:
    """Changes whenever a file that a row is made of does."""
    found: list[int] = []
    folder = str(path)
    for name in WATCHED:
        try:
            known = os.stat(f"{folder}/{name}")  # noqa: PTH116 (a thousand runs: pathlib takes three times as long)
        except OSError:
            found += [0, 0]
        else:
            found += [known.st_mtime_ns, known.st_size]
    return tuple(found)
