"""What whoever watches is told of the queues: counted as things move, and right whatever they do."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from palestra.episodes.board import EpisodeBoard
from palestra.types.episode_rows import SavedRows
from palestra.types.episodes import (
    ClaimRequest,
    EndRequest,
    EpisodeInfo,
    EpisodeKind,
    EpisodeResult,
    EpisodeState,
    LeaseRef,
    NewGroup,
)
from palestra.types.rollouts import Task

TASK = Task(id="t", environment="e", prompt=[])
STEPS = ("train", "eval", "claim", "end", "release", "cancel", "commit", "later")


def check(board: EpisodeBoard) -> None:
    """Against the episodes themselves."""
    found: list[EpisodeInfo] = board.episodes("alice", limit=1000).episodes
    for response in board.queues():
        mine = [one for one in found if one.kind is response.kind]
        since = [one.created_at for one in mine if one.state is EpisodeState.QUEUED]
        leased = sum(one.state is EpisodeState.LEASED for one in mine)
        assert (response.queued, response.oldest_at, response.leased) == (len(since), min(since, default=None), leased)


@example(["train", "train", "cancel", "cancel"])
@given(st.lists(st.sampled_from(STEPS), max_size=40))
def test_queues_are_told_as_they_are(steps: list[str]) -> None:
    board, now, leases = EpisodeBoard(), 0.0, list[LeaseRef]()
    board.put_run("alice", "r", now)
    for number, step in enumerate(steps):
        now += 0.25
        match step:
            case "train" | "eval":
                new = NewGroup(group_id=f"g{number}", task=TASK, size=2, kind=EpisodeKind(step), priority=number % 3)
                board.register("alice", "r", [new], now)
            case "claim":
                got = board.claim("alice", ClaimRequest(client_id="c", claim_id=f"c{number}"), now)
                leases += [LeaseRef(episode_id=one.episode_id, attempt=one.attempt) for one in got]
            case "end" if leases:
                ref = leases.pop(0)
                ask = EndRequest(episode_id=ref.episode_id, attempt=ref.attempt, result=EpisodeResult(reward=1.0))
                board.end("alice", "c", [ask], now)
            case "release" if leases:
                board.release("alice", "c", [leases.pop()], "", now)
            case "cancel":
                waiting = board.episodes("alice", state=EpisodeState.QUEUED).episodes
                board.cancel("alice", "r", now, episode_ids=[one.episode_id for one in waiting[:1]])
            case "commit":
                board.commit("alice", "r", board.run_info("alice", "r").delivered, now)
            case _:
                now += 100.0
                board.tick(now)
        check(board)


def test_nothing_is_told_of_an_empty_board() -> None:
    assert EpisodeBoard.restore(SavedRows(), 0.0).queues() == []
