"""Which run is claimed from next, by their shares.

Owns: fairness between runs. Never touches: the order within a run, leases, time.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from palestra.episodes.records import BoardEpisode, BoardRun
from palestra.types.episodes import EpisodeKind


class StrideScheduler:
    """Stride scheduling: of the runs that have something, the one that is least far goes next, and moves on by 1/share.

    One schedule for each owner and for each kind that is asked for, so that who asks for one kind alone does not move
    the others' order. A run that was away (idle, paused) does not catch up."""

    def __init__(self) -> None:
        self._clocks: dict[tuple[str, EpisodeKind | None], float] = {}
        """How far the last one was that was served."""

    def take(
        self, rooms: Mapping[BoardRun, int], owner: str, kind: EpisodeKind | None, most: int
    ) -> list[BoardEpisode]:
        """Out of their queues. All runs are the owner's, and each has something. `rooms`: how many at most, of each."""
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
