"""Timers of leases, back-offs and deadlines.

The heap is lazy: an entry whose object has changed stays, and is dropped as dead when it comes to the top, or when the
heap has doubled since it was cleaned. A lease has one live entry, however often it is renewed: `armed_at` is the time
of that entry, `expires_at` the end of the lease. When the entry is due and the lease was renewed meanwhile, it is
pushed again with the later end. So a heartbeat costs no push, and a lease one per lease time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import count

from palestra.episodes.records import BoardEpisode, BoardGroup
from palestra.types.episodes import EpisodeState, GroupState

SLACK = 1024  # entries before it is worth looking for dead ones

Entry = tuple[float, int, int, int, BoardEpisode | BoardGroup]
"""Time; then the order of registration, with deadlines first; a tie-break; the object."""


class Timers:
    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._pushes = count()
        self._look_at = SLACK
        self.earliest = math.inf
        """Nothing is due before this time. Like `next`, but dead entries count, too."""

    def watch_lease(self, episode: BoardEpisode) -> None:
        """Keeps one entry for each lease: a heartbeat only moves the lease's end, and the entry follows when it is
        due."""
        if episode.armed_at is None or episode.armed_at > episode.expires_at:
            episode.armed_at = episode.expires_at
            self._push(episode.expires_at, episode)

    def watch_backoff(self, episode: BoardEpisode) -> None:
        self._push(episode.not_before, episode)

    def watch_deadline(self, group: BoardGroup) -> None:
        if group.deadline is not None:
            self._push(group.deadline, group)

    def due(self, now: float) -> Iterator[BoardEpisode | BoardGroup]:
        """Yields, by time, leases that have expired, episodes whose back-off is over and open groups whose deadline has
        passed. Entries that are added meanwhile are included."""
        while self._heap and self._heap[0][0] <= now:
            entry = self._pop()
            if not _is_live(entry):
                continue
            when, what = entry[0], entry[-1]
            if isinstance(what, BoardEpisode) and what.state is EpisodeState.LEASED:
                what.armed_at = None
                if not what.does_age:
                    continue  # it is watched again when it ages again
                if what.expires_at > when:
                    self.watch_lease(what)
                    continue
            yield what

    def next(self) -> float | None:
        while self._heap and not _is_live(self._heap[0]):
            self._pop()
        return self._heap[0][0] if self._heap else None

    def _push(self, when: float, what: BoardEpisode | BoardGroup) -> None:
        group, index = (what, -1) if isinstance(what, BoardGroup) else (what.group, what.index)
        heapq.heappush(self._heap, (when, group.serial, index, next(self._pushes), what))
        if len(self._heap) >= self._look_at:
            self._heap = [entry for entry in self._heap if _is_live(entry)]
            heapq.heapify(self._heap)
            self._look_at = max(SLACK, 2 * len(self._heap))
        self.earliest = self._heap[0][0] if self._heap else math.inf

    def _pop(self) -> Entry:
        entry = heapq.heappop(self._heap)
        self.earliest = self._heap[0][0] if self._heap else math.inf
        return entry


def _is_live(entry: Entry) -> bool:
    when, what = entry[0], entry[-1]
    if isinstance(what, BoardGroup):
        return what.state is GroupState.OPEN
    if what.state is EpisodeState.LEASED:
        return what.armed_at == when
    return what.state is EpisodeState.QUEUED and not what.is_ready and what.not_before == when
