"""Episodes on disk: what the board changed comes back, on both databases."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from palestra.episodes.board import EpisodeBoard
from palestra.store import Store
from palestra.store.queries.episodes import load_all, save_changes
from palestra.types.episode_rows import Change, EpisodeRow, Gone, SavedRows
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


def save(store: Store, changes: Sequence[Change]) -> None:
    store.write_now(lambda conn: save_changes(conn, changes))


def load(store: Store) -> SavedRows:
    return store.read_now(load_all)


def claim(board: EpisodeBoard, now: float) -> Lease:
    request = ClaimRequest(client_id="c", claim_id=f"claim-{next(claim_ids)}")
    (lease,) = board.claim("alice", request, now)
    return lease


def end(board: EpisodeBoard, lease: Lease, result: EpisodeResult, now: float) -> EndStatus:
    ask = EndRequest(episode_id=lease.episode_id, attempt=lease.attempt, result=result)
    return board.end("alice", "c", [ask], now)[0].status


def make_board() -> tuple[EpisodeBoard, Lease, Lease]:
    """With something in every state and column."""
    board = EpisodeBoard()
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


def test_every_row_comes_back_as_it_was(tables_store: Store) -> None:
    board, _, _ = make_board()
    changes = board.take_changes()
    save(tables_store, changes)
    assert sorted_rows(load(tables_store)) == sorted(repr(change) for change in changes)
    assert {change.state for change in changes if isinstance(change, EpisodeRow)} == {
        EpisodeState.ENDED,
        EpisodeState.LEASED,
        EpisodeState.QUEUED,
        EpisodeState.CANCELLED,
    }


def test_a_board_goes_on_from_what_was_saved(tables_store: Store) -> None:
    board, ended, leased = make_board()
    save(tables_store, board.take_changes())
    again = EpisodeBoard.restore(load(tables_store), 1000.0)
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


def test_what_is_committed_leaves_the_tables(tables_store: Store) -> None:
    board, _, leased = make_board()
    save(tables_store, board.take_changes())
    end(board, leased, EpisodeResult(reward=1.0), 7.0)
    board.cancel("alice", "r", 8.0, group_ids=["g/1"])
    board.commit("alice", "r", 2, 9.0)
    save(tables_store, board.take_changes())
    saved = load(tables_store)
    assert (saved.groups, saved.episodes) == ([], [])
    assert sorted((stone.attempt, stone.owner) for stone in saved.tombstones) == [
        (-1, "alice"),  # of groups: their serial numbers
        (0, "alice"),
        (1, "alice"),
        (1, "alice"),
    ]
    again = EpisodeBoard.restore(saved, 10.0)
    assert again.run_info("alice", "r") == board.run_info("alice", "r")
    assert end(again, leased, EpisodeResult(reward=1.0), 11.0) is EndStatus.REPEATED
    again.tick(10.0 + 8 * 86_400)
    save(tables_store, again.take_changes())
    assert load(tables_store).tombstones == []


def test_of_several_changes_of_a_row_the_last_one_counts(tables_store: Store) -> None:
    board, ended, _ = make_board()
    early = board.take_changes()
    board.note_call("alice", LeaseRef(episode_id=board.leases()[0].ref.episode_id, attempt=1), 7.0)
    late = board.take_changes()
    save(tables_store, [*early, *late, Gone(EpisodeRow, ended.episode_id)])
    saved = load(tables_store)
    assert ended.episode_id not in {row.episode_id for row in saved.episodes}
    assert max(row.calls for row in saved.episodes) == 2


def test_thousands_of_changes_are_saved_at_once(tables_store: Store) -> None:
    board = EpisodeBoard()
    board.put_run("alice", "r", 0.0)
    groups = [NewGroup(group_id=f"g{number}", task=TASK, size=4) for number in range(500)]
    board.register("alice", "r", groups, 1.0)
    save(tables_store, board.take_changes())
    assert len(load(tables_store).episodes) == 2000
    board.cancel("alice", "r", 2.0, group_ids=[group.group_id for group in groups])
    board.commit("alice", "r", 500, 3.0)
    save(tables_store, board.take_changes())
    saved = load(tables_store)
    assert (len(saved.episodes), len(saved.groups), len(saved.tombstones)) == (0, 0, 500)
