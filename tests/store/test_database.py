"""Group commit: durable when it returns, each write on its own, whoever shared the transaction."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from sqlalchemy import Connection, event, insert, select, text

from palestra.store import Store, StoreError
from palestra.store.tables import settings as table
from tests.properties import examples


class Refused(Exception):
    pass


def put(name: str) -> Callable[[Connection], str]:
    def work(conn: Connection) -> str:
        conn.execute(insert(table).values(name=name, value="v"))
        return name

    return work


def put_and_fail(name: str) -> Callable[[Connection], str]:
    def work(conn: Connection) -> str:
        put(name)(conn)
        raise Refused(name)

    return work


def names(conn: Connection) -> set[str]:
    return set(conn.execute(select(table.c.name)).scalars())


def hold_writer(store: Store) -> threading.Event:
    """The writer waits in a transaction, so that what is queued meanwhile becomes one group."""
    started, go = threading.Event(), threading.Event()
    threading.Thread(target=store.write_now, args=(lambda _conn: (started.set(), go.wait(10)),), daemon=True).start()
    started.wait(10)
    return go


def count_commits(store: Store) -> list[int]:
    commits: list[int] = []
    event.listen(store._writes, "commit", lambda _conn: commits.append(1))
    return commits


def test_what_is_queued_is_committed_together_and_failures_stay_alone(store: Store) -> None:
    async def run() -> list[str | BaseException]:
        commits = count_commits(store)
        go = hold_writer(store)
        works = [put_and_fail(f"n{i}") if i % 3 == 0 else put(f"n{i}") for i in range(30)]
        tasks = [asyncio.create_task(store.write(work)) for work in works]
        await asyncio.sleep(0)
        go.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert len(commits) == 2  # the one that waited, and all the others
        return outcomes

    outcomes = asyncio.run(run())
    for i, outcome in enumerate(outcomes):
        assert isinstance(outcome, Refused) if i % 3 == 0 else outcome == f"n{i}"
    assert store.read_now(names) == {f"n{i}" for i in range(30) if i % 3}


@examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fates=st.lists(st.sampled_from(["ok", "raise", "constraint", "syntax", "swallow"]), max_size=12))
def test_any_mix_of_failures_leaves_exactly_what_was_acknowledged(store: Store, fates: list[str]) -> None:
    store.write_now(lambda conn: conn.execute(table.delete()))
    store.write_now(put("taken"))

    def work(i: int, fate: str) -> Callable[[Connection], str]:
        def run(conn: Connection) -> str:
            name = put(f"n{i}")(conn)
            if fate == "raise":
                raise Refused
            if fate == "constraint":
                put("taken")(conn)
            if fate == "syntax":
                conn.execute(text("SELEC"))
            if fate == "swallow":
                with pytest.raises(Exception, match=r"taken|UNIQUE"), conn.begin_nested():
                    put("taken")(conn)
            return name

        return run

    async def run() -> list[str | BaseException]:
        go = hold_writer(store)
        tasks = [asyncio.create_task(store.write(work(i, fate))) for i, fate in enumerate(fates)]
        await asyncio.sleep(0)
        go.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = asyncio.run(run())
    assert [isinstance(o, str) for o in outcomes] == [fate in ("ok", "swallow") for fate in fates]
    assert store.read_now(names) == {"taken"} | {o for o in outcomes if isinstance(o, str)}


def test_failed_commit_is_raised_to_all_and_the_next_group_works(store: Store) -> None:
    commits = 0

    def fail_second(_conn: Connection) -> None:
        nonlocal commits
        commits += 1
        if commits == 2:
            raise OSError("disk full")

    async def run() -> list[str | BaseException]:
        event.listen(store._writes, "commit", fail_second)
        go = hold_writer(store)
        tasks = [asyncio.create_task(store.write(put(f"n{i}"))) for i in range(3)]
        await asyncio.sleep(0)
        go.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = asyncio.run(run())
    assert [type(o) for o in outcomes] == [StoreError] * 3
    assert "disk full" in str(outcomes[0])
    assert store.read_now(names) == set()
    assert store.write_now(put("after")) == "after"
    assert store.read_now(names) == {"after"}


def test_work_that_raises_what_no_future_takes_leaves_the_others_told(store: Store) -> None:
    def run_out(_conn: Connection) -> str:
        return next(iter(()))

    async def run() -> list[str | BaseException]:
        go = hold_writer(store)
        tasks = [asyncio.create_task(store.write(work)) for work in (run_out, put("last"))]
        await asyncio.sleep(0)
        go.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    run_dry, last = asyncio.run(asyncio.wait_for(run(), 20))
    assert isinstance(run_dry, RuntimeError)
    assert last == "last"
    assert store.read_now(names) == {"last"}
    with pytest.raises(RuntimeError, match="StopIteration"):
        store.write_now(run_out)


def test_transaction_ended_by_the_database_acknowledges_nothing(store: Store) -> None:
    """As SQLite does by itself when a disk is full, and a server by closing the connection."""

    def end_transaction(conn: Connection) -> None:
        if conn.dialect.name == "sqlite":
            conn.exec_driver_sql("ROLLBACK")
            raise Refused
        conn.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    async def run() -> list[str | BaseException | None]:
        go = hold_writer(store)
        works = [put("before"), end_transaction, put("behind")]
        tasks = [asyncio.create_task(store.write(work)) for work in works]
        await asyncio.sleep(0)
        go.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(o) for o in asyncio.run(run())] == [StoreError] * 3
    assert store.read_now(names) == set()
    assert store.write_now(put("after")) == "after"


def test_cancelled_before_its_turn_is_not_written(store: Store) -> None:
    async def run() -> None:
        go = hold_writer(store)
        task = asyncio.create_task(store.write(put("cancelled")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        go.set()
        await store.write(put("other"))

    asyncio.run(run())
    assert store.read_now(names) == {"other"}


def test_reads_do_not_wait_for_a_write_and_see_what_is_committed(store: Store) -> None:
    async def run() -> None:
        await store.write(put("there"))
        go = hold_writer(store)
        waiting = asyncio.create_task(store.write(put("later")))
        assert await asyncio.gather(*(store.read(names) for _ in range(20))) == [{"there"}] * 20
        go.set()
        await waiting
        assert await store.read(names) == {"there", "later"}

    asyncio.run(run())


def test_reading_connections_cannot_write(store: Store) -> None:
    with pytest.raises(Exception, match=r"read-?only"):
        store.read_now(put("no"))


def test_one_store_serves_many_loops_and_threads(store: Store) -> None:
    def run(thread: int) -> None:
        async def writes() -> None:
            await asyncio.gather(*(store.write(put(f"{thread}-{i}")) for i in range(25)))

        asyncio.run(writes())

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.read_now(names)) == 100


def test_closing_writes_what_is_queued_and_refuses_more(database_url: str) -> None:
    async def run() -> None:
        async with Store.open(database_url) as store:
            go = hold_writer(store)
            queued = [asyncio.create_task(store.write(put(f"n{i}"))) for i in range(5)]
            await asyncio.sleep(0)
            go.set()
        assert await asyncio.gather(*queued) == [f"n{i}" for i in range(5)]
        with pytest.raises(StoreError, match="closed"):
            await store.write(put("late"))

    asyncio.run(run())
    with Store.open(database_url) as store:
        assert store.read_now(names) == {f"n{i}" for i in range(5)}


WRITER = """
import asyncio, itertools, sys
from palestra.store import Store
from palestra.store.queries.settings import setting_once

async def main():
    store, numbers = Store.open(sys.argv[1]), itertools.count()
    async def client():
        for number in numbers:
            await store.write(lambda conn: setting_once(conn, str(number), lambda: "v"))
            print(number, flush=True)
    await asyncio.gather(*(client() for _ in range(8)))

asyncio.run(main())
"""


def test_kill_9_loses_nothing_acknowledged(database_url: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", WRITER, database_url], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    acknowledged = {child.stdout.readline().strip() for _ in range(200)}
    child.kill()
    acknowledged |= {line.strip() for line in child.stdout.read().splitlines(keepends=True) if line.endswith("\n")}
    child.wait()
    child.stdout.close()
    assert len(acknowledged) >= 200
    with Store.open(database_url) as store:  # the lock went with the process
        assert acknowledged <= store.read_now(names)


def test_a_server_that_was_replaced_while_it_was_away_cannot_write(database_url: str) -> None:
    """The other one is gone already, so the lock is free: what the first one knows is outdated all the same."""
    if not database_url.startswith("postgresql"):
        pytest.skip("SQLite's lock is not lost with a connection")

    async def run() -> None:
        lost = threading.Event()
        async with Store.open(database_url) as first:
            first.on_lock_lost = lost.set
            await first.take_place()
            assert await cut_off(first) == "put"  # nobody else was there
            await first.write(put("before"))
            with pytest.raises(StoreError):
                await first.write(lambda c: c.execute(text("SELECT pg_terminate_backend(pg_backend_pid())")))
            async with Store.open(database_url) as second:
                await second.take_place()
                await second.write(put("second"))
            with pytest.raises(StoreError, match="another server has used the database"):
                await first.write(put("after"))
            assert lost.is_set()
            assert {"before", "second"} <= first.read_now(names)
            assert "after" not in first.read_now(names)

    async def cut_off(store: Store) -> str:
        with pytest.raises(StoreError):
            await store.write(lambda c: c.execute(text("SELECT pg_terminate_backend(pg_backend_pid())")))
        return await store.write(put("put"))

    asyncio.run(run())
