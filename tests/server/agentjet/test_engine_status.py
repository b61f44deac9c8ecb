"""What clients are told about the engine: rules, announcements, what survives. A real broker on SQLite, no server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from palestra.config.serve import ModelConfig, ServeConfig
from palestra.server.agentjet.trainer import AgentJetTrainer, TrainerRefusal
from palestra.server.agentjet.trainer_records import TrainerRecord, TrainerRecords
from palestra.server.agentjet.trainer_status import FED_S, has_begun, why_not
from palestra.server.broker.service import EpisodeService
from palestra.server.core.pictures.picture_cache import PictureCache
from palestra.server.core.telemetry.metrics import Metrics
from palestra.server.core.telemetry.observer import CallObserver
from palestra.store import Store
from palestra.store.queries.keys import hash_key, list_keys
from palestra.store.records import Rights
from palestra.types.episodes import ClaimRequest, EndRequest, EpisodeResult, NewGroup, RunInfo, RunSettings
from palestra.types.rollouts import Task
from palestra.types.tinkerscript import ENGINE_MOVES, EngineStatus

S = EngineStatus
ALICE = "alice"


@dataclass
class Trainer:
    """One that feeds the broker by itself."""

    episodes: EpisodeService
    run: str = "r"
    owner: str = ALICE

    async def put(self) -> None:
        await self._do("run put", lambda board, now: board.put_run(self.owner, self.run, now))

    async def register(self, group_id: str = "g") -> None:
        group = NewGroup(group_id=group_id, task=Task(id="t", environment="e", prompt=[]), size=1)
        await self._do("groups registered", lambda board, now: board.register(self.owner, self.run, [group], now))

    async def pause(self) -> None:
        await self._do("run paused", lambda board, now: board.pause(self.owner, self.run, now))

    async def play_and_commit(self) -> None:
        request = ClaimRequest(client_id="c", claim_id="1", run=self.run)
        (lease,) = await self.episodes.broker.do(lambda board, now: board.claim(self.owner, request, now))
        end = EndRequest(episode_id=lease.episode_id, attempt=lease.attempt, result=EpisodeResult(reward=1.0))
        await self.episodes.broker.do(lambda board, now: board.end(self.owner, "c", [end], now))
        await self._do("groups committed", lambda board, now: board.commit(self.owner, self.run, 1, now))

    async def _do(self, what: str, work: Callable[..., object]) -> None:
        await self.episodes.broker.do(work)
        self.episodes.broker.observer.changed(what, self.owner, self.run)


@dataclass
class World:
    engine: AgentJetTrainer
    episodes: EpisodeService
    store: Store
    now: list[float] = field(default_factory=lambda: [0.0])

    def trainer(self, run: str = "r", owner: str = ALICE) -> Trainer:
        return Trainer(self.episodes, run, owner)

    @property
    def status(self) -> EngineStatus:
        return self.engine.status(ALICE)


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    model = ModelConfig(path=folder, name=["student"])
    config, now = ServeConfig(state=folder, models=[model]), [0.0]
    store = Store.open(config.database)
    episodes = EpisodeService(
        store,
        config.episodes,
        CallObserver(Metrics()),
        "secret",
        PictureCache(folder / "pictures", 1 << 20),
        calls_waiting=dict,
        check_owner=lambda owner: None,
    )
    engine = AgentJetTrainer(config, store, episodes.broker, "http://127.0.0.1:8000", clock=lambda: now[0])
    try:
        async with episodes.running(), engine.running():
            yield World(engine, episodes, store, now)
    finally:
        await store.close()


def in_world(folder: Path, test: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        async with world(folder) as made:
            await test(made)

    asyncio.run(run())


# Who feeds the broker without having been started here


def test_a_plain_trainer_makes_it_roll_from_its_first_call(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        assert w.status is S.OFFLINE
        trainer, other = w.trainer(), w.trainer("other")
        await trainer.put()
        assert (w.status, w.engine.status("bob")) == (S.ROLLING, S.OFFLINE)
        await trainer.pause()
        assert w.status is S.WEIGHT_SYNCING
        await other.put()
        assert w.status is S.ROLLING  # one of the two can be played

    in_world(tmp_path, test)


def test_a_trainer_that_has_left_is_forgotten_when_nothing_of_it_is_open(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        trainer = w.trainer()
        await trainer.put()
        await trainer.register()
        w.now[0] += 2 * FED_S
        assert w.status is S.ROLLING  # there is something to play
        await trainer.play_and_commit()
        w.now[0] += FED_S - 1
        assert w.status is S.ROLLING  # it may be between two steps
        w.now[0] += 1
        assert w.status is S.OFFLINE

    in_world(tmp_path, test)


# What a trainer says of itself


def test_what_a_trainer_says_wins_until_it_says_offline(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        for status in (S.BOOTING, S.ROLLING, S.WEIGHT_SYNCING, S.WEIGHT_EXPORTING, S.ROLLING, S.ROLLING):
            await w.engine.announce(ALICE, status)
            assert w.status is status
        await w.trainer("tinkerscript").put()
        await w.trainer("tinkerscript").register()
        await w.engine.announce(ALICE, S.OFFLINE)
        assert w.status is S.OFFLINE  # whatever it has left behind
        assert "reported by its trainer" in w.engine.detail(ALICE)
        await w.trainer("tinkerscript").register("another")
        assert w.status is S.ROLLING

    in_world(tmp_path, test)


def test_moves_that_make_no_sense_are_refused_in_words(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        with pytest.raises(
            TrainerRefusal, match=r"is ENGINE\.OFFLINE; it can become .*ENGINE\.ROLLING, not ENGINE\.WEIGHT"
        ):
            await w.engine.announce(ALICE, S.WEIGHT_SYNCING)
        await w.engine.announce(ALICE, S.ROLLING)
        with pytest.raises(TrainerRefusal, match=r"not ENGINE\.BOOTING"):
            await w.engine.announce(ALICE, S.BOOTING)
        assert w.status is S.ROLLING

    in_world(tmp_path, test)


def test_every_state_has_a_way_to_offline_and_back() -> None:
    assert set(ENGINE_MOVES) == set(EngineStatus)
    assert all(not why_not(status, S.OFFLINE) for status in EngineStatus)
    assert {after for after in EngineStatus if not why_not(S.OFFLINE, after)} == {S.OFFLINE, S.BOOTING, S.ROLLING}


def test_what_was_said_is_there_after_a_restart(tmp_path: Path) -> None:
    async def say(w: World) -> None:
        await w.engine.announce(ALICE, S.ROLLING)
        await w.engine.announce(ALICE, S.WEIGHT_SYNCING)

    async def look(w: World) -> None:
        assert w.status is S.WEIGHT_SYNCING
        stopped = await w.engine.stop(ALICE)
        assert (stopped.pids, w.status) == ([], S.OFFLINE)

    in_world(tmp_path, say)
    in_world(tmp_path, look)


# Stopping what was not started here


def test_stopping_cancels_what_an_announced_trainer_left_and_nothing_else(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        theirs, other = w.trainer("tinkerscript"), w.trainer("other")
        for trainer in (theirs, other):
            await trainer.put()
            await trainer.register("a")
            await trainer.register("b")
        await w.engine.announce(ALICE, S.ROLLING)
        assert (await w.engine.stop(ALICE)).episodes == 2
        runs = {run.run: run for run in w.episodes.broker.board.runs(ALICE)}
        assert (runs["tinkerscript"].queued, runs["other"].queued) == (0, 2)
        with pytest.raises(
            TrainerRefusal, match="this server has not started an engine; a trainer elsewhere runs other, stop it"
        ):
            await w.engine.stop(ALICE)

    in_world(tmp_path, test)


def test_stopping_nothing_is_fine(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        stopped = await w.engine.stop(ALICE)
        assert (stopped.pids, stopped.episodes) == ([], 0)

    in_world(tmp_path, test)


def test_a_disk_that_takes_nothing_is_a_refusal_and_changes_nothing(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        (tmp_path / "engines").touch()  # where a folder should be
        with pytest.raises(TrainerRefusal, match=r"files cannot be written.*check the server's state folder"):
            await w.engine.sync(ALICE, "ajet: {model: {path: student}}")
        with pytest.raises(TrainerRefusal, match="there is no config yet"):
            await w.engine.start(ALICE, with_key=False)

    in_world(tmp_path, test)


def test_an_engine_never_has_the_run_of_trainers_outside(tmp_path: Path) -> None:
    async def test(w: World) -> None:
        request = "ajet: {model: {path: student}, experiment_name: tinkerscript}"
        job = await w.engine.sync(ALICE, request)
        assert job.mapped["name"] == "tinkerscript-2"

    in_world(tmp_path, test)


# A training process: the rule of its start, and what a restart finds


def info(version: int = 0, model: str | None = None, queued: int = 0) -> RunInfo:
    response = {"run": "r", "settings": RunSettings(), "is_paused": False, "committed": 0, "delivered": 0}
    return RunInfo(version=version, model=model, queued=queued, **response)


def test_an_engine_boots_until_it_has_published_and_registered() -> None:
    assert not has_begun(info(), (0, None))
    assert not has_begun(info(model="m"), (0, None))
    assert has_begun(info(model="m", queued=1), (0, None))
    assert not has_begun(info(3, "m", queued=5), (3, "m"))  # a run that is gone on with: all of it is from before
    assert has_begun(info(4, "n", queued=5), (3, "m"))


def test_an_engine_that_ran_when_the_server_ended_is_offline_and_says_why(tmp_path: Path) -> None:
    async def crash(w: World) -> None:
        await w.trainer("mine").put()
        await w.trainer("mine").register()
        key = await TrainerRecords(w.store).save_with_key(ALICE, TrainerRecord(run="mine", is_running=True))
        (kept,) = await w.store.read(list_keys)
        assert (kept.owner, kept.rights, kept.key_hash) == (ALICE, Rights.TRAINER, hash_key(key))

    async def look(w: World) -> None:
        assert w.status is S.OFFLINE  # though there is something to play: nobody reads it
        assert "the server was restarted" in w.engine.detail(ALICE)
        assert await w.store.read(list_keys) == []
        await w.trainer("mine").register("more")
        assert w.status is S.ROLLING  # somebody goes on with it by hand

    in_world(tmp_path, crash)
    in_world(tmp_path, look)
