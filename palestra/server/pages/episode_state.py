"""The caller's episodes as their page shows them: runs with their counts, who plays, a part of the episodes."""

from __future__ import annotations

from msgspec import Struct

from palestra.episodes.board import EpisodeBoard
from palestra.episodes.search import EpisodeSearch
from palestra.server.broker.service import EpisodeService
from palestra.types.episodes import EpisodeInfo, RunInfo

PAGE = 100


class EpisodeWorker(Struct, frozen=True, kw_only=True):
    """A client that holds leases."""

    client_id: str
    leases: int
    runs: list[str]
    oldest_s: float
    """How long it has held its oldest lease."""


class EpisodeOverview(Struct, frozen=True, kw_only=True):
    runs: list[RunInfo]
    workers: list[EpisodeWorker]
    """Those with the most leases first."""
    oldest_lease_s: float | None
    """None without a lease."""
    episodes: list[EpisodeInfo]
    """A part of those that fit the query, in the order of registration."""
    total: int
    """How many fit."""


async def read_episodes(service: EpisodeService, owner: str, query: EpisodeSearch, offset: int) -> EpisodeOverview:
    runs = await service.broker.do(lambda board, _now: board.runs(owner))
    workers = await service.broker.do(lambda board, now: _workers(board, owner, now))
    found = await service.timelines.search(owner, query, limit=PAGE, offset=offset)
    return EpisodeOverview(
        runs=[service.with_calls(owner, info) for info in runs],
        workers=workers,
        oldest_lease_s=max((worker.oldest_s for worker in workers), default=None),
        episodes=found.episodes,
        total=found.total,
    )


def _workers(board: EpisodeBoard, owner: str, now: float) -> list[EpisodeWorker]:
    held: dict[str, list[tuple[str, float]]] = {}
    for lease in board.leases():
        if lease.owner == owner:
            held.setdefault(lease.client_id, []).append((lease.run, now - lease.claimed_at))
    workers = [
        EpisodeWorker(
            client_id=client_id,
            leases=len(leases),
            runs=sorted({run for run, _ in leases}),
            oldest_s=max(0.0, *(age for _, age in leases)),
        )
        for client_id, leases in held.items()
    ]
    return sorted(workers, key=lambda worker: -worker.leases)
