"""The engine behind TinkerScript, one for each owner: the status of the trainer, and a training process on request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import structlog
from msgspec.structs import replace

from palestra.config.serve import ServeConfig
from palestra.episodes.board import EpisodeBoard
from palestra.server.agentjet import trainer_status as rules
from palestra.server.agentjet.names import RUN as TRAINER_RUN
from palestra.server.agentjet.settings import JobConfig
from palestra.server.agentjet.trainer_config import make_config, map_for_server, name_run, renamed
from palestra.server.agentjet.trainer_files import TrainerFolder
from palestra.server.agentjet.trainer_process import TrainingProcess, put_down
from palestra.server.agentjet.trainer_records import TrainerRecord, TrainerRecords
from palestra.server.agentjet.trainer_status import FedRuns
from palestra.server.broker.broker import Broker
from palestra.server.core.background import Background
from palestra.store import Store
from palestra.types.episodes import EpisodeState, RunInfo
from palestra.types.tinkerscript import EngineStatus

log = structlog.get_logger()

P = ParamSpec("P")
T = TypeVar("T")
S = EngineStatus
EVERYTHING = 1 << 30
RESTARTED = "the engine ended because the server was restarted; /start_engine continues from the newest checkpoint"


class TrainerRefusal(Exception):
    """The call is refused in the present state; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class TrainerStopped:
    pids: list[int]
    episodes: int


@dataclass(slots=True)
class _Life:
    """The state of an owner's trainer in this server."""

    process: TrainingProcess | None = None
    before: rules.Weights = (0, None)
    """The weights of its run when the process was started."""
    has_begun: bool = False
    is_stopping: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Protects config, start, stop and end: one at a time."""


class AgentJetTrainer:
    def __init__(
        self,
        config: ServeConfig,
        store: Store,
        broker: Broker,
        own_url: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`own_url` is the address at which a training process reaches this server."""
        self._config, self._broker, self._own_url = config, broker, own_url
        self._records = TrainerRecords(store)
        self._lives: dict[str, _Life] = {}
        self._fed = FedRuns(clock)
        self._watching = Background()
        broker.observer.on_trainer = self._fed.note_feeding

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        for owner, record in (await self._records.load()).items():
            if record.process is not None:
                await asyncio.to_thread(put_down, record.process)
            if record.is_running:
                await self._records.save(owner, record.ended(RESTARTED))
        try:
            yield
        finally:
            await self.close()

    async def close(self) -> None:
        """Ends the processes. They are still recorded as running, so that the next start can say why they are not."""
        processes = [life.process for life in self._lives.values() if life.process is not None]
        self._lives.clear()
        await asyncio.gather(*(process.stop() for process in processes))
        await self._watching.settle_down()

    # Status

    def status(self, owner: str) -> EngineStatus:
        """Returns the status, by the first row of the table in docs/compatibility.md that applies."""
        life, record = self._lives.get(owner), self._records.of(owner)
        if life is not None and life.is_stopping:
            return S.OFFLINE
        if record.announced is not None:
            return record.announced
        if life is None or life.process is None:
            return rules.of_runs(self._feeding(owner))
        run = self._run(owner, record.run)
        life.has_begun = life.has_begun or (run is not None and rules.has_begun(run, life.before))
        return rules.of_runs([run]) if run is not None and life.has_begun else S.BOOTING

    def detail(self, owner: str) -> str:
        life, record = self._lives.get(owner), self._records.of(owner)
        if life is not None and life.process is not None:
            return f"run {record.run!r}, process {life.process.pid}; its log: {self._named(life.process)}"
        return record.detail if self.status(owner) is S.OFFLINE else ""

    def _feeding(self, owner: str) -> list[RunInfo]:
        """Returns runs of trainers that were not started here."""
        return self._fed.of(owner, self._broker.board.runs(owner), self._records.of(owner).set_aside)

    def _run(self, owner: str, name: str) -> RunInfo | None:
        return next((run for run in self._broker.board.runs(owner) if run.run == name), None)

    async def announce(self, owner: str, status: EngineStatus) -> None:
        """Takes the status that a trainer reports. It is valid until the trainer reports that it is offline."""
        life = self._life(owner)
        async with life.lock:
            if life.process is not None:
                raise TrainerRefusal(
                    f"this server started the engine and knows its status itself; {_stop_it(life.process)}"
                )
            if reason := rules.why_not(self.status(owner), status):
                raise TrainerRefusal(reason)
            record = replace(self._records.of(owner), announced=status)
            if status is S.OFFLINE:
                record = replace(record.without(TRAINER_RUN), announced=None, detail="reported by its trainer")
            await self._records.save(owner, record)
            if status is S.OFFLINE:
                self._fed.forget(owner, TRAINER_RUN)
        self._broker.look_again(owner)
        log.info("engine announced", owner=owner, status=status)

    # Config, start, stop

    async def sync(self, owner: str, text: str) -> JobConfig:
        """Takes a config. May also raise AgentJetError."""
        life, folder = self._life(owner), TrainerFolder(self._config.state, owner)
        async with life.lock:
            if life.process is not None:
                raise TrainerRefusal(f"the engine keeps the config it was started with; {_stop_it(life.process)}")
            job = await asyncio.to_thread(map_for_server, text, self._config.models)
            record = self._records.of(owner)
            run = name_run(job.run, record, folder, self._taken(owner))
            config = await _on_disk(make_config, job, run, folder, self._own_url)
            await self._records.save(owner, replace(record, config=config, run=run, asked_name=job.run))
        if folder.has_begun(run):
            job.notes.append(f"/start_engine continues run {run!r}; another experiment_name starts a new run")
        log.info("engine config taken", owner=owner, run=run, unknown=len(job.unknown))
        return job

    async def start(self, owner: str, *, with_key: bool) -> int:
        """Starts the training process and returns its pid."""
        life, folder = self._life(owner), TrainerFolder(self._config.state, owner)
        async with life.lock:
            record = replace(self._next_run(owner, life, folder), is_running=True, detail="")
            record = replace(record, set_aside=[run for run in record.set_aside if run != record.run])
            assert record.config is not None
            file = await _on_disk(folder.write_config, record.run, record.config | {"server": self._own_url})
            key = (
                await self._records.save_with_key(owner, record)
                if with_key
                else await self._records.save(owner, record)
            )
            run = self._run(owner, record.run)
            life.before, life.has_begun = (0, None) if run is None else (run.version, run.model), False
            about = ["--resume", record.run, "-c", str(file)] if folder.has_begun(record.run) else [str(file)]
            log_file = folder.log_file(record.run)
            try:
                process = await TrainingProcess.start(about, folder.path, log_file, key)
            except OSError as error:
                await self._records.save(
                    owner, self._records.of(owner).ended(f"its process could not be started: {error}")
                )
                raise TrainerRefusal(f"the training process could not be started: {error}") from None
            life.process = process
            self._watching.run(self._watch(owner, life, process))
            await self._records.save(owner, replace(self._records.of(owner), process=process.mark))
        log.info("engine started", owner=owner, run=record.run, pid=process.pid)
        return process.pid

    async def stop(self, owner: str) -> TrainerStopped:
        """Stops the process and cancels the remaining episodes of its run. Does nothing if it is offline."""
        life = self._life(owner)
        async with life.lock:
            process, record = life.process, self._records.of(owner)
            if process is None and record.announced is None:
                if fed := self._feeding(owner):
                    names = ", ".join(run.run for run in fed)
                    raise TrainerRefusal(
                        f"this server has not started an engine; a trainer elsewhere runs {names}, stop it there"
                    )
                return TrainerStopped([], 0)
            run, life.is_stopping = TRAINER_RUN if process is None else record.run, True
            try:
                if process is not None:
                    await process.stop()
                episodes = await self._broker.do(lambda board, now: _cancel_all(board, owner, run, now))
                record = replace(record.ended("it was stopped by /stop_engine"), announced=None)
                await self._records.save(owner, record.without(run))
                self._fed.forget(owner, run)
            finally:
                life.process, life.is_stopping = None, False
        log.info("engine stopped", owner=owner, run=run, episodes=episodes)
        return TrainerStopped([] if process is None else [process.pid], episodes)

    async def _watch(self, owner: str, life: _Life, process: TrainingProcess) -> None:
        code = await process.wait()
        async with life.lock:
            if self._lives.get(owner) is not life or life.process is not process:  # it was stopped meanwhile
                return
            record, detail = self._records.of(owner), "it finished its last step"
            if code != 0:
                output = await asyncio.to_thread(process.last_output)
                detail = f"its training process ended with code {code}: {output} (its log: {self._named(process)})"
            log.warning("engine ended", owner=owner, run=record.run, code=code, detail=detail)
            self._fed.forget(owner, record.run)
            try:
                await self._records.save(owner, record.ended(f"run {record.run!r}: {detail}", is_done=code == 0))
            finally:
                life.process = None

    def _named(self, process: TrainingProcess) -> str:
        """Returns the path of its log relative to the state folder, whose location not every caller needs to know."""
        return str(process.log_file.relative_to(self._config.state))

    def _life(self, owner: str) -> _Life:
        return self._lives.setdefault(owner, _Life())

    def _taken(self, owner: str) -> set[str]:
        return {TRAINER_RUN, *(run.run for run in self._broker.board.runs(owner))}

    def _next_run(self, owner: str, life: _Life, folder: TrainerFolder) -> TrainerRecord:
        """Returns the run of the config, or a new one with a similar name if that one is complete."""
        record = self._records.of(owner)
        if life.process is not None:
            raise TrainerRefusal(f"an engine runs already, with run {record.run!r}; {_stop_it(life.process)}")
        if record.announced is not None:
            raise TrainerRefusal(
                f"another trainer has reported the status {record.announced}; stop it first: /stop_engine"
            )
        if record.config is None:
            raise TrainerRefusal("there is no config yet; send one first: /sync_train_config")
        if record.run not in record.done:
            return record
        run = name_run(record.asked_name, record, folder, self._taken(owner))
        return replace(record, run=run, config=renamed(record.config, run))


async def _on_disk(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return await asyncio.to_thread(work, *args, **kwargs)
    except OSError as error:
        raise TrainerRefusal(
            f"the engine's files cannot be written: {error}; check the server's state folder"
        ) from None


def _stop_it(process: TrainingProcess) -> str:
    return f"/stop_engine ends process {process.pid}"


def _cancel_all(board: EpisodeBoard, owner: str, run: str, now: float) -> int:
    if run not in {one.run for one in board.runs(owner)}:
        return 0
    states = (EpisodeState.QUEUED, EpisodeState.LEASED)
    found = [one for state in states for one in board.episodes(owner, run=run, state=state, limit=EVERYTHING).episodes]
    groups = dict.fromkeys(one.group_id for one in found)
    return board.cancel(owner, run, now, group_ids=groups, reason="the engine was stopped")
