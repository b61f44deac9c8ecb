"""The queue of one run: episodes by kind, highest priority first, environments by their weights.

run           kind -> queues of environments          a claim names the kind, or the run's settings say which is first
environments  name -> queue, "" for those without a weight
queue         heap of (-priority, group, index)       the members of a group stay together

Of the environments whose first episode has the highest priority, the one with the smallest pass value p is served
(stride scheduling): p = max(p, clock), clock = p, then p += 1 / weight. So environments are served in proportion to
their weights, and one that was empty does not catch up.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import count
from typing import Generic, Protocol, TypeVar

from palestra.types.episodes import EpisodeKind, NewGroup

SLACK = 64  # dead entries that a heap may have before it is worth looking for them
OTHERS = ""  # key of environments without a weight


class QueuedGroup(Protocol):
    @property
    def spec(self) -> NewGroup: ...

    @property
    def serial(self) -> int: ...


class Queued(Protocol):
    """An episode as a queue knows it."""

    is_ready: bool

    @property
    def group(self) -> QueuedGroup: ...

    @property
    def index(self) -> int: ...


E = TypeVar("E", bound=Queued)
Entry = tuple[int, int, int, int, E]
"""Priority, group, index, and how many were pushed before."""


class EnvironmentQueue(Generic[E]):
    """A heap whose dead entries stay until they come to the top, or are more than half of it."""

    def __init__(self) -> None:
        self.size = 0
        """Number of episodes; the heap may have more entries."""
        self._heap: list[Entry[E]] = []
        self._pushes = count()

    def push(self, episode: E) -> None:
        group = episode.group
        # The members of a group stay together, and those that were lost or that replace others come before later
        # groups.
        entry = (-group.spec.priority, group.serial, episode.index, next(self._pushes), episode)
        heapq.heappush(self._heap, entry)
        episode.is_ready = True
        self.size += 1

    def pop(self) -> E:
        while True:
            episode = heapq.heappop(self._heap)[-1]
            if episode.is_ready:
                episode.is_ready = False
                self.size -= 1
                return episode

    def discard(self, episode: E) -> None:
        episode.is_ready = False
        self.size -= 1
        if len(self._heap) > 2 * self.size + SLACK:
            self._heap = list(self._live().values())
            heapq.heapify(self._heap)

    def urgency(self) -> int:
        """Urgency of the first episode, which must exist; a smaller number is more urgent."""
        while not self._heap[0][-1].is_ready:
            heapq.heappop(self._heap)
        return self._heap[0][0]

    def episodes(self) -> list[E]:
        return list(self._live())

    def _live(self) -> dict[E, Entry[E]]:
        """Returns one entry for each episode: one that left and came back has several entries."""
        return {entry[-1]: entry for entry in self._heap if entry[-1].is_ready}


class EnvironmentQueues(Generic[E]):
    """The queues of one kind of episode: one for each environment that has a weight, and one for all others.

    Among those whose first episode has the highest priority, stride scheduling decides, as between runs.
    """

    def __init__(self) -> None:
        self.size = 0
        self._weights: Mapping[str, float] = {}
        self._others = EnvironmentQueue[E]()
        self._queues = {OTHERS: self._others}
        self._passed: dict[str, float] = {}
        self._clock = 0.0

    def weigh(self, weights: Mapping[str, float]) -> None:
        waiting = [episode for queue in self._queues.values() for episode in queue.episodes()]
        self._weights, self._passed, self._clock = weights, {}, 0.0
        self._queues = {name: EnvironmentQueue[E]() for name in (OTHERS, *weights)}
        self._others = self._queues[OTHERS]
        for episode in waiting:
            self._queue_of(episode).push(episode)

    def push(self, episode: E) -> None:
        queue = self._queue_of(episode) if self._weights else self._others
        queue.push(episode)
        self.size += 1

    def discard(self, episode: E) -> None:
        self._queue_of(episode).discard(episode)
        self.size -= 1

    def pop(self) -> E:
        self.size -= 1
        if not self._weights:
            return self._others.pop()
        waiting = [(name, queue) for name, queue in self._queues.items() if queue.size]
        urgency = min(queue.urgency() for _, queue in waiting)
        first = [(max(self._passed.get(n, 0.0), self._clock), n) for n, queue in waiting if queue.urgency() == urgency]
        self._clock, name = min(first)
        self._passed[name] = self._clock + 1.0 / self._weights.get(name, 1.0)
        return self._queues[name].pop()

    def _queue_of(self, episode: E) -> EnvironmentQueue[E]:
        return self._queues.get(episode.group.spec.task.environment) or self._others


class RunQueue(Generic[E]):
    def __init__(self) -> None:
        self._train, self._eval = EnvironmentQueues[E](), EnvironmentQueues[E]()
        self._queues = {EpisodeKind.TRAIN: self._train, EpisodeKind.EVAL: self._eval}
        self.passed: dict[EpisodeKind | None, float] = {}
        """Pass value in the stride schedule of clients that claim this kind, or any kind."""

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Sets the weights of environments."""
        for queues in self._queues.values():
            queues.weigh(weights)

    def push(self, episode: E) -> None:
        self._queues[episode.group.spec.kind].push(episode)

    def discard(self, episode: E) -> None:
        self._queues[episode.group.spec.kind].discard(episode)

    def has(self, kind: EpisodeKind | None) -> bool:
        return (self._train.size + self._eval.size if kind is None else self._queues[kind].size) > 0

    def pop(self, kind: EpisodeKind | None, *, eval_first: bool) -> E:
        if kind is not None:
            return self._queues[kind].pop()
        first, second = (self._eval, self._train) if eval_first else (self._train, self._eval)
        return (first if first.size else second).pop()
