"""What waits to be claimed: by run and kind, the most urgent first, runs by their shares.

Owns: order and fairness. Never touches: leases, groups, time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import count
from typing import TYPE_CHECKING

from palestra.types.episodes import EpisodeKind

if TYPE_CHECKING:
    from palestra.episodes.records import Episode, Run

SLACK = 64  # entries of a heap that may be dead before it is worth a look


class Lane:
    """A heap whose dead entries stay until they come to the top, or are more than half of it."""

    def __init__(self) -> None:
        self.size = 0
        """Episodes in it; the heap may have more entries."""
        self._heap: list[tuple[int, int, int, int, Episode]] = []
        self._pushes = count()

    def push(self, episode: Episode) -> None:
        group = episode.group
        # The members of a group stay together, and those that were lost or replace another come before later groups.
        entry = (-group.spec.priority, group.serial, episode.index, next(self._pushes), episode)
        heapq.heappush(self._heap, entry)
        episode.is_ready = True
        self.size += 1

    def pop(self) -> Episode:
        while True:
            episode = heapq.heappop(self._heap)[-1]
            if episode.is_ready:
                self._leave(episode)
                return episode

    def discard(self, episode: Episode) -> None:
        self._leave(episode)
        if len(self._heap) > 2 * self.size + SLACK:
            live = {entry[-1]: entry for entry in self._heap if entry[-1].is_ready}
            self._heap = list(live.values())
            heapq.heapify(self._heap)

    def _leave(self, episode: Episode) -> None:
        episode.is_ready = False
        self.size -= 1


class RunQueue:
    def __init__(self) -> None:
        self._lanes = {kind: Lane() for kind in EpisodeKind}
        self.passed: dict[EpisodeKind | None, float] = {}
        """How far it is in the stride schedule of those who claim this kind, or any."""

    def push(self, episode: Episode) -> None:
        self._lanes[episode.kind].push(episode)

    def discard(self, episode: Episode) -> None:
        self._lanes[episode.kind].discard(episode)

    def has(self, kind: EpisodeKind | None) -> bool:
        return any(self._lanes[one].size for one in (EpisodeKind if kind is None else (kind,)))

    def pop(self, kind: EpisodeKind | None, *, eval_first: bool) -> Episode:
        if kind is None:
            first, second = EpisodeKind.TRAIN, EpisodeKind.EVAL
            if eval_first:
                first, second = second, first
            kind = first if self._lanes[first].size else second
        return self._lanes[kind].pop()


class Shares:
    """Stride scheduling: of the runs that have something, the one that is least far goes next, and moves on by 1/share.

    One schedule for each owner and for each kind that is asked for, so that who asks for one kind alone does not move
    the others' order. A run that was away (idle, paused) does not catch up."""

    def __init__(self) -> None:
        self._clocks: dict[tuple[str, EpisodeKind | None], float] = {}
        """How far the last one was that was served."""

    def take(self, runs: Iterable[Run], owner: str, kind: EpisodeKind | None, most: int) -> list[Episode]:
        """Out of their queues. All runs are the owner's, and each has something."""
        clock = self._clocks.get((owner, kind), 0.0)
        order = [(max(run.queue.passed.get(kind, 0.0), clock), run.name, run) for run in runs]
        heapq.heapify(order)
        taken: list[Episode] = []
        while order and len(taken) < most:
            clock, name, run = order[0]
            taken.append(run.queue.pop(kind, eval_first=run.settings.eval_first))
            run.queue.passed[kind] = clock + 1.0 / run.settings.share
            if run.queue.has(kind):
                heapq.heapreplace(order, (run.queue.passed[kind], name, run))
            else:
                heapq.heappop(order)
        self._clocks[owner, kind] = clock
        return taken
