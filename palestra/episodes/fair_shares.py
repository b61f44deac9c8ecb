"""Decides which run is claimed from next, by the shares of the runs."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from palestra.episodes.records import BoardEpisode, BoardRun
from palestra.types.episodes import EpisodeKind


class StrideScheduler:
    """Stride scheduling: of the runs with queued episodes, the one with the smallest pass value is served next, and its
    value grows by 1/share.

    There is one schedule for each owner and for each kind that is requested, so that clients who request one kind alone
    do not change the order of the others. A run that was absent (idle, paused) does not catch up.
    """

    def __init__(self) -> None:
        self._clocks: dict[tuple[str, EpisodeKind | None], float] = {}
        """Pass value of the run that was served last."""

    def take(
        self, rooms: Mapping[BoardRun, int], owner: str, kind: EpisodeKind | None, most: int
    ) -> list[BoardEpisode]:
        """Takes up to `most` episodes out of the queues. All runs are the owner's, and each has queued episodes.
        `rooms` is the maximum for each run."""
        clock = self._clocks.get((owner, kind), 0.0)
        order = [(max(run.queue.passed.get(kind, 0.0), clock), run.name, run) for run in rooms]
        heapq.heapify(order)
        left = dict(rooms)
        taken: list[BoardEpisode] = []
        while order and len(taken) < most:
            clock, name, run = order[0]
            taken.append(run.queue.pop(kind, eval_first=run.settings.eval_first))
            run.queue.passed[kind] = clock + 1.0 / run.settings.share
            left[run] -= 1
            if left[run] and run.queue.has(kind):
                heapq.heapreplace(order, (run.queue.passed[kind], name, run))
            else:
                heapq.heappop(order)
        self._clocks[owner, kind] = clock
        return taken
