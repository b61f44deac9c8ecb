"""A board with a clock and a disk: time passes when a test says so, and a restart knows only what was saved."""

from __future__ import annotations

from itertools import count
from typing import Any

from palestra.episodes.board import EpisodeBoard
from palestra.episodes.limits import EpisodeLimits
from palestra.types.episode_rows import EpisodeRow, Gone, GroupRow, Key, Row, RunRow, SavedRows, Tombstone
from palestra.types.episodes import (
    ClaimRequest,
    EndAnswer,
    EndRequest,
    EpisodeInfo,
    EpisodeResult,
    HeartbeatAnswer,
    Lease,
    LeaseRef,
    NewGroup,
    PlayedGroup,
    RunInfo,
    RunSettings,
)
from palestra.types.rollouts import Task

TASK = Task(id="t", environment="e", prompt=[{"role": "user", "content": "hello"}])
OWNER, RUN = "alice", "r"


def new_group(group_id: str = "g", size: int = 1, **options: Any) -> NewGroup:
    return NewGroup(group_id=group_id, task=TASK, size=size, **options)


def ref(lease: Lease) -> LeaseRef:
    return LeaseRef(episode_id=lease.episode_id, attempt=lease.attempt)


class Disk:
    """What `save_changes` keeps, in a dict."""

    def __init__(self) -> None:
        self.rows: dict[tuple[type[Row], Key], Row] = {}

    def save(self, board: EpisodeBoard) -> None:
        for change in board.take_changes():
            if isinstance(change, Gone):
                self.rows.pop((change.kind, change.key), None)
            else:
                self.rows[type(change), change.key] = change

    def load(self) -> SavedRows:
        rows = list(self.rows.values())
        return SavedRows(
            runs=[row for row in rows if isinstance(row, RunRow)],
            groups=[row for row in rows if isinstance(row, GroupRow)],
            episodes=[row for row in rows if isinstance(row, EpisodeRow)],
            tombstones=[row for row in rows if isinstance(row, Tombstone)],
        )


class Play:
    """Everything in one run of one owner, unless a test says otherwise."""

    def __init__(self, limits: EpisodeLimits | None = None, **settings: Any) -> None:
        self.limits, self.now, self.disk = limits, 1000.0, Disk()
        self._board = EpisodeBoard(limits)
        self._claims = count()
        self.put_run(**settings)

    @property
    def board(self) -> EpisodeBoard:
        """With everything saved that was done so far."""
        self.disk.save(self._board)
        return self._board

    def put_run(self, run: str = RUN, owner: str = OWNER, **settings: Any) -> RunInfo:
        return self.board.put_run(owner, run, self.now, settings=RunSettings(**settings), model="m")

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.board.tick(self.now)

    def restart(self, *, keep_calls: bool = False) -> None:
        old = self.board
        calls = old.open_calls() if keep_calls else {}
        self._board = EpisodeBoard.restore(self.disk.load(), self.now, limits=self.limits, open_calls=calls)
        assert self._board.take_changes() == []

    def register(self, group_id: str = "g", size: int = 1, run: str = RUN, **options: Any) -> list[str]:
        """The episodes' ids."""
        (made,) = self.board.register(OWNER, run, [new_group(group_id, size, **options)], self.now)
        return made.episode_ids

    def claim(self, most: int = 1, *, client: str = "c", claim: str = "", **options: Any) -> list[Lease]:
        claim = claim or f"claim-{next(self._claims)}"
        request = ClaimRequest(client_id=client, claim_id=claim, max_n=most, **options)
        return self.board.claim(OWNER, request, self.now)

    def claim_one(self, **options: Any) -> Lease:
        (lease,) = self.claim(**options)
        return lease

    def end(self, lease: Lease, reward: float = 1.0, *, client: str | None = "c") -> EndAnswer:
        return self.end_with(lease, EpisodeResult(reward=reward), client=client)

    def end_with(self, lease: Lease, result: EpisodeResult, *, client: str | None = "c") -> EndAnswer:
        ask = EndRequest(episode_id=lease.episode_id, attempt=lease.attempt, result=result)
        (ended,) = self.board.end(OWNER, client, [ask], self.now)
        return ended

    def beat(self, lease: Lease, *, client: str | None = "c") -> HeartbeatAnswer:
        (beat,) = self.board.heartbeat(OWNER, client, [ref(lease)], self.now)
        return beat

    def release(self, lease: Lease, reason: str = "", *, client: str = "c") -> HeartbeatAnswer:
        (beat,) = self.board.release(OWNER, client, [ref(lease)], reason, self.now)
        return beat

    def call(self, lease: Lease, version: int | None = None) -> int:
        """The version that answers; the call stays open."""
        return self.board.note_call(OWNER, ref(lease), self.now, version=version).version

    def call_over(self, lease: Lease) -> None:
        self.board.call_over(ref(lease), self.now)

    def publish(self, version: int) -> RunInfo:
        return self.board.publish(OWNER, RUN, self.now, version=version, model=f"m{version}")

    def pause(self) -> None:
        self.board.pause(OWNER, RUN, self.now)

    def resume(self) -> None:
        self.board.resume(OWNER, RUN, self.now)

    def cancel(self, *episode_ids: str, groups: tuple[str, ...] = (), reason: str = "") -> int:
        board = self.board
        return board.cancel(OWNER, RUN, self.now, episode_ids=episode_ids, group_ids=groups, reason=reason)

    def requeue(self, *episode_ids: str) -> int:
        return self.board.requeue(OWNER, episode_ids, self.now)

    def delivered(self, after: int = 0, limit: int = 100, version: int | None = None) -> list[PlayedGroup]:
        return self.board.delivered(OWNER, RUN, self.now, after=after, limit=limit, version=version)

    def commit(self, cursor: int) -> RunInfo:
        return self.board.commit(OWNER, RUN, cursor, self.now)

    def info(self, episode_id: str) -> EpisodeInfo:
        return self.board.find(OWNER, episode_id)

    def run(self) -> RunInfo:
        return self.board.run_info(OWNER, RUN)

    def lose(self, times: int = 1) -> None:
        """Attempts of whatever comes next: nobody beats."""
        for _ in range(times):
            self.claim_one()
            self.wait(10_000.0)  # beyond any lease
            self.wait(10_000.0)  # beyond any back-off
