"""Episodes on disk: what the board changed comes back, on both databases."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from itertools import count

import msgspec
import pytest
from sqlalchemy import func, select

from palestra.episodes.board import Board
from palestra.store import Store
from palestra.store.databases import Driver
from palestra.store.episodes import (
    FEW,
    LARGE_BYTES,
    MANY,
    MOST_BYTES,
    EpisodeWriter,
    load_all,
    log_entry,
    save_changes,
)
from palestra.store.tables import episode_log
from palestra.types.episode_rows import Change, EpisodeRow, Gone, Key, RunRow, SavedRows
from palestra.types.episodes import (
    ClaimRequest,
    EndRequest,
    EndStatus,
    EpisodeResult,
    EpisodeState,
    Lease,
    LeaseRef,
    NewGroup,
    RunSettings,
    WeightPolicy,
)
from palestra.types.rollouts import Task

TASK = Task(
    id="t", environment="e", prompt=[{"role": "user", "content": "Grüße \0 'quoted' \U0001f600"}], extras={"n": 1}
)
claim_ids = count()


def log_changes(driver: Driver, changes: Sequence[Change]) -> None:
    log_entry(driver, msgspec.msgpack.encode(changes))


Keep = Callable[[Store, Sequence[Change]], None]


@pytest.fixture(params=[save_changes, log_changes])
def keep(request: pytest.FixtureRequest) -> Keep:
    """In the tables, or in the log before them."""
    return lambda store, changes: store.write_now(lambda conn: request.param(Driver.of(conn), changes))


def load(store: Store) -> SavedRows:
    return store.read_now(load_all)


def claim(board: Board, now: float) -> Lease:
    request = ClaimRequest(client_id="c", claim_id=f"claim-{next(claim_ids)}")
    (lease,) = board.claim("alice", request, now)
    return lease


def end(board: Board, lease: Lease, result: EpisodeResult, now: float) -> EndStatus:
    ask = EndRequest(episode_id=lease.episode_id, attempt=lease.attempt, result=result)
    return board.end("alice", "c", [ask], now)[0].status


def make_board() -> tuple[Board, Lease, Lease]:
    """With something in every state and column."""
    board = Board()
    settings = RunSettings(weight_policy=WeightPolicy.LAG, share=0.5, backoff_s=7.25, lease_s=10.0)
    board.put_run("alice", "r", 1.5, settings=settings, model="tinker://x")
    board.put_run("bob", "r", 2.0)
    first = NewGroup(group_id="g/1", task=TASK, size=3, seeds=(-(2**63), 2**63 - 1), deadline_s=1e6, tags={"a": "b"})
    board.register("alice", "r", [first, NewGroup(group_id="g/2", task=TASK, size=1)], 3.0)
    board.publish("alice", "r", 3.5, version=4, model="tinker://y")
    ended, leased, released = (claim(board, 4.0) for _ in range(3))
    board.note_call("alice", LeaseRef(episode_id=leased.episode_id, attempt=1), 5.0)
    result = EpisodeResult(reward=0.1 + 0.2, metrics={"m": 1.0}, metadata={"text": "\0 é", "deep": [{"x": None}]})
    assert end(board, ended, result, 6.0) is EndStatus.ACCEPTED
    board.release("alice", "c", [LeaseRef(episode_id=released.episode_id, attempt=1)], "no \0 'reason'", 6.5)
    board.cancel("alice", "r", 6.75, group_ids=["g/2"], reason="for \0 once")
    return board, ended, leased


def sorted_rows(saved: SavedRows) -> list[str]:
    return sorted(repr(row) for row in [*saved.runs, *saved.groups, *saved.episodes, *saved.tombstones])


def test_every_row_comes_back_as_it_was(tables_store: Store, keep: Keep) -> None:
    board, _, _ = make_board()
    changes = board.take_changes()
    keep(tables_store, changes)
    assert sorted_rows(load(tables_store)) == sorted(repr(change) for change in changes)
    assert {change.state for change in changes if isinstance(change, EpisodeRow)} == {
        EpisodeState.ENDED,
        EpisodeState.LEASED,
        EpisodeState.QUEUED,
        EpisodeState.CANCELLED,
    }


def test_a_board_goes_on_from_what_was_saved(tables_store: Store, keep: Keep) -> None:
    board, ended, leased = make_board()
    keep(tables_store, board.take_changes())
    again = Board.restore(load(tables_store), 1000.0)
    result = EpisodeResult(reward=0.1 + 0.2, metrics={"m": 1.0}, metadata={"text": "\0 é", "deep": [{"x": None}]})
    assert end(again, ended, result, 1001.0) is EndStatus.REPEATED
    assert end(again, leased, result, 1001.0) is EndStatus.ACCEPTED
    assert again.run_info("alice", "r") != board.run_info("alice", "r")
    for one in (board, again):
        one.publish("alice", "r", 1002.0, version=5, model="z")
    last = claim(again, 1010.0)
    assert (last.attempt, last.version, last.task) == (2, 5, TASK)
    end(again, last, result, 1011.0)
    (dropped, ready) = again.delivered("alice", "r", 1012.0, after=0, limit=10)
    assert (dropped.reason, [one.info.seed for one in ready.episodes][:2]) == (
        "cancelled: for  once",
        [-(2**63), 2**63 - 1],
    )


def test_what_is_committed_leaves_the_tables(tables_store: Store, keep: Keep) -> None:
    board, _, leased = make_board()
    keep(tables_store, board.take_changes())
    end(board, leased, EpisodeResult(reward=1.0), 7.0)
    board.cancel("alice", "r", 8.0, group_ids=["g/1"])
    board.commit("alice", "r", 2, 9.0)
    keep(tables_store, board.take_changes())
    saved = load(tables_store)
    assert (saved.groups, saved.episodes) == ([], [])
    assert sorted((stone.attempt, stone.owner) for stone in saved.tombstones) == [
        (-1, "alice"),  # of groups: their serial numbers
        (0, "alice"),
        (1, "alice"),
        (1, "alice"),
    ]
    again = Board.restore(saved, 10.0)
    assert again.run_info("alice", "r") == board.run_info("alice", "r")
    assert end(again, leased, EpisodeResult(reward=1.0), 11.0) is EndStatus.REPEATED
    again.tick(10.0 + 8 * 86_400)
    keep(tables_store, again.take_changes())
    assert load(tables_store).tombstones == []


def test_of_several_changes_of_a_row_the_last_one_counts(tables_store: Store, keep: Keep) -> None:
    board, ended, _ = make_board()
    early = board.take_changes()
    board.note_call("alice", LeaseRef(episode_id=board.leases()[0].ref.episode_id, attempt=1), 7.0)
    late = board.take_changes()
    keep(tables_store, [*early, *late, Gone("EpisodeRow", ended.episode_id)])
    saved = load(tables_store)
    assert ended.episode_id not in {row.episode_id for row in saved.episodes}
    assert max(row.calls for row in saved.episodes) == 2


def test_many_changes_are_one_statement_each(tables_store: Store, keep: Keep) -> None:
    board = Board()
    board.put_run("alice", "r", 0.0)
    groups = [NewGroup(group_id=f"g{number}", task=TASK, size=4) for number in range(500)]
    board.register("alice", "r", groups, 1.0)
    keep(tables_store, board.take_changes())
    assert len(load(tables_store).episodes) == 2000
    board.cancel("alice", "r", 2.0, group_ids=[group.group_id for group in groups])
    board.commit("alice", "r", 500, 3.0)
    keep(tables_store, board.take_changes())
    saved = load(tables_store)
    assert (len(saved.episodes), len(saved.groups), len(saved.tombstones)) == (0, 0, 500)


def test_few_changes_are_logged_and_after_many_all_go_into_the_tables(tables_store: Store) -> None:
    """What is found on the way is always what was saved, whatever is where."""
    board, ways, doubts, playing = Board(), random.Random(7), random.Random(8), list[Lease]()
    disk: dict[tuple[str, Key], Change] = {}
    board.put_run("alice", "r", 0.0, settings=RunSettings(max_queued=10_000, max_ready=10_000))
    sizes = set[int]()

    def play(number: int, now: float) -> None:
        match ways.choice(["register", "register many", "claim", "end", "end", "commit"]):
            case "register":
                board.register("alice", "r", [NewGroup(group_id=f"g{number}", task=TASK, size=1)], now)
            case "register many" if ways.random() < 0.05:
                many = [NewGroup(group_id=f"g{number}/{n}", task=TASK, size=1) for n in range(2 * FEW)]
                board.register("alice", "r", many, now)
            case "claim":
                playing.extend(board.claim("alice", ClaimRequest(client_id="c", claim_id=f"c{number}"), now))
            case "end" if playing:
                end(board, playing.pop(0), EpisodeResult(reward=1.0), now)
            case "commit" if ways.random() < 0.05:
                board.commit("alice", "r", board.run_info("alice", "r").delivered, now)

    async def run() -> None:
        writer, loop = EpisodeWriter(tables_store), asyncio.get_running_loop()
        for number in range(4 * MANY):
            play(number, float(number))
            if changes := board.take_changes():
                told = loop.create_future()
                writer.begin_save(loop, changes, told.set_result)
                assert await told is None
                if doubts.random() < 0.02:
                    writer.failed()  # as far as it knows, there may be more in the log, or less
            for change in changes:
                if isinstance(change, Gone):
                    disk.pop((change.kind, change.key), None)
                else:
                    disk[type(change).__name__, change.key] = change
            logged = await tables_store.read(lambda conn: conn.execute(select(func.count()).select_from(episode_log)))
            sizes.add(logged.scalar_one())
            if number % 50 == 0:
                assert sorted_rows(await tables_store.read(load_all)) == sorted(map(repr, disk.values()))

    asyncio.run(asyncio.wait_for(run(), 60))
    assert sorted_rows(load(tables_store)) == sorted(map(repr, disk.values()))
    assert 0 in sizes
    assert MANY // 4 < max(sizes) <= MANY


def test_what_an_earlier_server_logged_comes_before_what_is_saved_now(tables_store: Store, keep: Keep) -> None:
    board, _, _ = make_board()
    changes = board.take_changes()
    tables_store.write_now(lambda conn: log_changes(Driver.of(conn), changes))
    (run,) = [change for change in changes if isinstance(change, RunRow) and change.owner == "bob"]
    keep(tables_store, [Gone("RunRow", run.key)])
    assert [found.owner for found in load(tables_store).runs] == ["alice"]


def test_large_changes_are_not_logged_and_the_log_stays_small(tables_store: Store) -> None:
    board = Board()
    board.put_run("alice", "r", 0.0, settings=RunSettings(max_queued=10_000))
    sizes: list[int] = []

    def register(name: str, size: int) -> list[Change]:
        task = Task(id="t", environment="e", prompt=[{"role": "user", "content": "x" * size}])
        board.register("alice", "r", [NewGroup(group_id=name, task=task, size=1)], 1.0)
        return board.take_changes()

    async def run() -> None:
        writer, loop = EpisodeWriter(tables_store), asyncio.get_running_loop()
        larges = [LARGE_BYTES * 3 // 4] * (2 * MOST_BYTES // LARGE_BYTES)
        for number, size in enumerate((10, *larges, LARGE_BYTES, 10)):
            told = loop.create_future()
            writer.begin_save(loop, register(f"g{number}", size), told.set_result)
            assert await told is None
            entries = await tables_store.read(lambda conn: conn.execute(select(episode_log.c.entry)).scalars().all())
            sizes.append(sum(map(len, entries)))
        assert len(load(tables_store).groups) == len(larges) + 3

    asyncio.run(asyncio.wait_for(run(), 60))
    assert sizes[-2] == 0
    assert MOST_BYTES - LARGE_BYTES < max(sizes) <= MOST_BYTES + LARGE_BYTES
    assert sizes.count(0) >= 3  # the first, the large one, and where the log was full
