"""A sweep's folder: which runs it has, what was decided about them, how each is doing.

What it writes, and what it only reads:

    runs/NAME/sweep.json        the plan, written once: the sweep's config, and every run's settings and config
    runs/NAME/decisions.jsonl   runs that were ended early or took over another's weights, and why
    runs/NAME/engine/           state of the server that all runs share
    runs/NAME-00/ …             the runs; `engine` in each is a link to the sweep's
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from msgspec import Struct

from palestra.config.redaction import redact
from palestra.config.sweep import SweepConfig
from palestra.runs.lock import RunLock, read_holder
from palestra.runs.reader import RunNotFound, RunReader, RunStatus
from palestra.runs.record_files import LineFile, RunError, read_json, read_lines, write_json
from palestra.runs.saved_checkpoints import values_by_step
from palestra.sweeps.settings import Setting
from palestra.util.json_types import JsonObject
from palestra.util.renamed import with_new_dotted_keys, with_new_keys
from palestra.util.suggest import did_you_mean

FORMAT = 1
PLAN, DECISIONS = "sweep.json", "decisions.jsonl"


class SweepNotFound(RunError, LookupError):
    """There is no such sweep."""


class MemberStatus(StrEnum):
    """The state of a sweep's run."""

    WAITING = "waiting"
    """The run has not begun."""
    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    """The run has ended before its last step, by an early stop or because it was asked to stop."""
    PRUNED = "pruned"
    """The sweep has ended it, because others were better."""
    FAILED = "failed"
    PAUSED = "paused"
    """The run was compared, and makes room for runs that wait until all were."""
    CUT = "cut"
    """The run is about to go on, or the sweep was interrupted; resumed, it goes on with this run."""

    @property
    def is_over(self) -> bool:
        return self in (MemberStatus.DONE, MemberStatus.STOPPED, MemberStatus.PRUNED)


class PlannedMember(Struct, frozen=True):
    """A run of a sweep as it was planned."""

    name: str
    settings: Setting
    """What it differs in, by dotted keys."""
    config: JsonObject
    """The run's whole config."""


class SweepPlan(Struct, frozen=True, kw_only=True):
    """What a sweep consists of; it never changes."""

    format: int = FORMAT
    name: str
    created: float
    sweep: JsonObject
    """The SweepConfig."""
    metric: str
    members: list[PlannedMember]


class Decision(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a sweep has decided about a run, at a step at which runs were compared."""

    kind: str
    """pruned; kept; evolved; or paused, until all runs can be compared."""
    member: str
    step: int
    reason: str
    value: float | None = None
    """What the run's setting had reached, of the sweep's metric."""
    attempt: int | None = None
    """Which start of the run this ends, to go on later: of one that is paused or evolves."""
    source: str | None = None
    """The run whose weights and optimizer an evolved one takes over."""
    settings: Setting | None = None
    """The settings with which an evolved run goes on."""
    time: float = msgspec.field(default_factory=time.time)


class MemberState(Struct, frozen=True, kw_only=True):
    """A run of a sweep as it is now."""

    name: str
    settings: Setting
    status: MemberStatus
    step: int
    """Steps that are done."""
    steps: int
    values: dict[int, float]
    """The sweep's metric by step."""
    attempt: int = 0
    """How often it was started."""
    error: str | None = None
    """Why it has failed."""

    @property
    def last(self) -> float | None:
        return self.values[max(self.values)] if self.values else None


class SweepReader:
    """Reads the folder of a sweep. Raises SweepNotFound if it is not one."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()
        if not (self.path / PLAN).is_file():
            raise SweepNotFound(f"{self.path} is not a sweep: it has no {PLAN}")
        try:
            self.plan = _with_new_keys(msgspec.convert(read_json(self.path / PLAN), SweepPlan))
        except msgspec.ValidationError as error:
            raise RunError(f"{self.path / PLAN}: not the plan of a sweep ({error})") from None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> SweepConfig:
        return SweepConfig.model_validate(self.plan.sweep)

    @property
    def is_running(self) -> bool:
        holder = read_holder(self.path / "lock")
        return holder is not None and holder.is_alive

    def member_path(self, member: str) -> Path:
        return self.path.parent / member

    def decisions(self) -> list[Decision]:
        rows = [msgspec.convert(row, Decision) for row in read_lines(self.path / DECISIONS)]
        return [
            one if one.settings is None else msgspec.structs.replace(one, settings=with_new_dotted_keys(one.settings))
            for one in rows
        ]

    def members(self) -> list[PlannedMember]:
        """The runs in the order of the plan, with the settings that they have now."""
        evolved = {one.member: one.settings for one in self.decisions() if one.settings is not None}
        return [msgspec.structs.replace(one, settings=evolved.get(one.name, one.settings)) for one in self.plan.members]

    def evolution_of(self, member: str) -> Decision | None:
        """The newest decision by which a run takes over another one's weights."""
        return next((one for one in reversed(self.decisions()) if one.member == member and one.source), None)

    def states(self) -> list[MemberState]:
        """All runs as they are now, in the order of the plan."""
        decisions: dict[str, list[Decision]] = {}
        for one in self.decisions():
            decisions.setdefault(one.member, []).append(one)
        return [self._state(member, decisions.get(member.name, [])) for member in self.members()]

    def _state(self, member: PlannedMember, decisions: Sequence[Decision]) -> MemberState:
        """`decisions` are those about this run, oldest first."""
        is_pruned = any(one.kind == "pruned" for one in decisions)
        known = {"name": member.name, "settings": member.settings, "steps": member.config["steps"]}
        try:
            run = RunReader(self.member_path(member.name))
        except RunNotFound:
            status = MemberStatus.PRUNED if is_pruned else MemberStatus.WAITING
            return MemberState(**known, status=status, step=0, values={})
        status, summary, rows = run.status(), run.read_summary(), run.read_metrics()
        shown, attempt = _member_status(status, summary), summary.get("attempts", 1)
        if is_pruned and shown not in (MemberStatus.RUNNING, MemberStatus.DONE):
            shown = MemberStatus.PRUNED
        elif shown is MemberStatus.STOPPED and any(one.attempt == attempt for one in decisions):
            shown = MemberStatus.PAUSED if decisions[-1].kind == "paused" else MemberStatus.CUT
        return MemberState(
            **known,
            status=shown,
            step=max((row["step"] for row in rows), default=0),
            values=values_by_step(run, self.plan.metric),
            attempt=attempt,
            error=summary.get("error") if shown is MemberStatus.FAILED else None,
        )


def _with_new_keys(plan: SweepPlan) -> SweepPlan:
    """The plan with today's names for keys of configs that had others when it was written."""
    dotted = {name: with_new_dotted_keys(plan.sweep.get(name) or {}) for name in ("set", "vary")}
    members = [
        PlannedMember(one.name, with_new_dotted_keys(one.settings), with_new_keys(one.config)) for one in plan.members
    ]
    return msgspec.structs.replace(plan, sweep=plan.sweep | dotted, members=members)


def _member_status(status: RunStatus, summary: JsonObject) -> MemberStatus:
    """A run that was interrupted says why in `error`; one that has stopped in good order says nothing."""
    match status:
        case RunStatus.RUNNING:
            return MemberStatus.RUNNING
        case RunStatus.DONE:
            return MemberStatus.DONE
        case RunStatus.FAILED:
            return MemberStatus.FAILED
        case RunStatus.STOPPED if "error" not in summary:
            return MemberStatus.STOPPED
    return MemberStatus.CUT


class SweepFolder(SweepReader):
    """A sweep's folder that this process alone writes."""

    def __init__(self, path: Path, lock: RunLock) -> None:
        super().__init__(path)
        self._lock = lock
        self._decisions = LineFile(self.path / DECISIONS)

    @classmethod
    def create(cls, root: Path, plan: SweepPlan) -> Self:
        """Makes the folder of a new sweep in `root`. Raises RunError if it or one of its runs is there already."""
        path = root / plan.name
        path.mkdir(parents=True, exist_ok=True)
        lock = RunLock(path / "lock")
        try:
            for taken in (path / PLAN, path / "config.json", *(root / one.name for one in plan.members)):
                if taken.exists():
                    raise RunError(f"{taken} already exists; give the sweep another --name, or go on: --resume NAME")
            write_json(path / PLAN, json.loads(redact(json.dumps(msgspec.to_builtins(plan)))))
            return cls(path, lock)
        except BaseException:
            lock.close()
            raise

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens the folder of an existing sweep to go on."""
        reader = SweepReader(path)
        lock = RunLock(reader.path / "lock")
        try:
            return cls(reader.path, lock)
        except BaseException:
            lock.close()
            raise

    def decide(self, decisions: Sequence[Decision]) -> None:
        """Records decisions; they are on disk when this returns."""
        for one in decisions:
            self._decisions.append(msgspec.to_builtins(one))

    def close(self) -> None:
        self._decisions.close()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def member_name(sweep: str, index: int, count: int) -> str:
    return f"{sweep}-{index:0{len(str(count - 1))}d}"


def list_sweeps(root: Path) -> list[SweepReader]:
    """The sweeps of a folder, newest first."""
    found = [SweepReader(file.parent) for file in root.glob(f"*/{PLAN}")]
    return sorted(found, key=lambda one: one.plan.created, reverse=True)


def find_sweep(which: str, root: Path) -> SweepReader:
    """A name in `root`, or a path."""
    for path in (root / which, Path(which)):
        if (path / PLAN).is_file():
            return SweepReader(path)
    names = [file.parent.name for file in root.glob(f"*/{PLAN}")]
    raise SweepNotFound(f"no sweep {which!r} in {root}; {did_you_mean(which, names)}")
