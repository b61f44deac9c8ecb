"""Calls about thousands of episodes: others are answered meanwhile, and a crash leaves all or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Connection, text

from palestra.config.serve import EpisodesConfig
from palestra.server.broker.board_writer import NotSaved
from palestra.server.broker.service import EpisodeService
from palestra.server.core.pictures.picture_cache import PictureCache
from palestra.server.core.telemetry.metrics import Metrics
from palestra.server.core.telemetry.observer import CallObserver
from palestra.store import Store
from palestra.types.episodes import NewGroup, Registered
from palestra.types.rollouts import Task
from tests.server.episodes.conftest import Api, group

TASK = Task(id="t", environment="e", prompt=[])
MANY = [NewGroup(group_id=f"g{number}", task=TASK, size=100) for number in range(30)]


@asynccontextmanager
async def opened(folder: Path, config: EpisodesConfig | None = None) -> AsyncIterator[tuple[EpisodeService, Store]]:
    store = Store.open(f"sqlite:///{folder}/palestra.db")
    episodes = EpisodeService(
        store,
        config or EpisodesConfig(),
        CallObserver(Metrics()),
        "secret",
        PictureCache(folder / "pictures", 1 << 20),
        calls_waiting=dict,
        check_owner=lambda owner: None,
    )
    try:
        async with episodes.running():
            await episodes.broker.do(lambda board, now: board.put_run("alice", "r", now))
            yield episodes, store
    finally:
        await store.close()


async def register(episodes: EpisodeService) -> list[Registered]:
    return await episodes.broker.do_in_parts(lambda board, now: board.register_in_parts("alice", "r", MANY, now))


def queued(episodes: EpisodeService) -> int:
    return episodes.broker.board.run_info("alice", "r").queued


def count(conn: Connection) -> int:
    return conn.execute(text("SELECT count(*) FROM episodes")).scalar_one()


def test_others_are_answered_between_the_parts(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path) as (episodes, store):
            bulk = asyncio.create_task(register(episodes))
            for number in range(3):
                name = f"other-{number}"
                await episodes.broker.do(lambda board, now, name=name: board.put_run("bob", name, now))
                assert not bulk.done()
                assert queued(episodes) == 0
            response = await bulk
            assert [(one.is_new, len(one.episode_ids)) for one in response] == [(True, 100)] * 30
            assert (queued(episodes), await store.read(count)) == (3000, 3000)

    asyncio.run(work())


def test_a_disk_that_fails_in_the_middle_leaves_nothing_of_it(tmp_path: Path) -> None:
    limit = "CREATE TRIGGER small BEFORE INSERT ON episodes WHEN (SELECT count(*) FROM episodes) >= 1500 BEGIN"

    async def work() -> None:
        async with opened(tmp_path) as (episodes, store):
            await store.write(lambda c: c.execute(text(f"{limit} SELECT RAISE(ABORT, 'it is full'); END")))
            with pytest.raises(NotSaved):
                await register(episodes)
            assert episodes.broker._reloading is not None
            await episodes.broker._reloading
            await episodes.broker.saving.saved()
            assert (queued(episodes), await store.read(count)) == (0, 0)
            await store.write(lambda c: c.execute(text("DROP TRIGGER small")))
            assert all(one.is_new for one in await register(episodes))
            assert (queued(episodes), await store.read(count)) == (3000, 3000)

    asyncio.run(work())


def test_thousands_are_registered_and_cancelled_over_http(alice: Api) -> None:
    response = alice.of_run("groups", groups=[group("a", 800), group("b", 700), group("a", 800)])["groups"]
    assert [(one["is_new"], len(one["episode_ids"])) for one in response] == [(True, 800), (True, 700), (False, 800)]
    refused = alice.send("POST", f"runs/{alice.run}/groups", {"groups": [group("c", 4000), group("a", 1)]})
    assert (refused.status_code, alice.info()["queued"]) == (409, 1500)
    assert alice.post("cancel", run=alice.run, group_ids=["a", "b"]) == {"cancelled": 1500}
    assert alice.of_run("commit", cursor=2)["committed"] == 2
    assert (alice.info()["queued"], alice.get("episodes", run=alice.run)["total"]) == (0, 0)


@pytest.mark.slow
def test_a_server_killed_while_it_registers_has_all_or_nothing(api: Api) -> None:
    groups = [group(f"g{number}", 50) for number in range(400)]
    seen: set[int] = set()
    for parts in (1, 4, 9, 15, 19):
        api.run = f"killed-{parts}"
        api.put_run()

        def send() -> bool:
            try:
                return api.send("POST", f"runs/{api.run}/groups", {"groups": groups}).status_code == 200
            except httpx.TransportError:
                return False

        with (
            ThreadPoolExecutor(1) as threads,
            Store.open(f"sqlite:///{api.server.state}/palestra.db", lock=False) as db,
        ):
            before, call = db.read_now(count), threads.submit(send)
            while db.read_now(count) - before < 1000 * parts and not call.done():
                pass
            api.server.restart()
            was_answered = call.result(60)
        seen.add(there := api.info()["queued"])
        assert there in ((20_000,) if was_answered else (0, 20_000))
        response = api.of_run("groups", groups=groups)["groups"]
        assert {one["is_new"] for one in response} == {there == 0}
        assert api.info()["queued"] == 20_000
    assert 0 in seen
