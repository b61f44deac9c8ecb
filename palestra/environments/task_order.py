"""The endless order of tasks, as a function of the seed and a number."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from palestra.types.rollouts import Task

PATTERN = 5040  # choices until the mix repeats; a multiple of 1 to 10, so that common shares are exact
KEPT_SHUFFLES = 2  # of each environment: those of this epoch and the last one, for callers that look back a little


class TaskOrder:
    """`order[i]` is a task for any i from 0. Each environment is spread evenly: any section has about its share."""

    def __init__(
        self, weighted: Sequence[tuple[float, Sequence[Task]]], seed: int, *, unshuffled: Collection[int] = ()
    ) -> None:
        """`unshuffled`: places of the environments whose tasks come in the order that they have."""
        if not weighted or any(weight <= 0 or not tasks for weight, tasks in weighted):
            raise ValueError("an order of tasks needs environments, each with tasks and a weight above 0")
        self._decks = [
            _Deck(tasks, None if place in unshuffled else f"{seed}/{place}")
            for place, (_, tasks) in enumerate(weighted)
        ]
        counts = _counts([weight for weight, _ in weighted])
        self._pattern = _pattern(counts)

    def __getitem__(self, index: int) -> Task:
        if index < 0:
            raise IndexError(f"tasks are numbered from 0, not {index}")
        rounds, place = divmod(index, len(self._pattern))
        deck, nth, each_round = self._pattern[place]
        return self._decks[deck][rounds * each_round + nth]


class _Deck:
    """One environment's tasks, shuffled again for each epoch; without a seed, in their own order each time."""

    def __init__(self, tasks: Sequence[Task], seed: str | None) -> None:
        self._tasks = tasks
        self._seed = seed
        self._shuffles: dict[int, list[int]] = {}

    def __getitem__(self, index: int) -> Task:
        epoch, place = divmod(index, len(self._tasks))
        if self._seed is None:
            return self._tasks[place]
        if epoch not in self._shuffles:
            if len(self._shuffles) >= KEPT_SHUFFLES:
                del self._shuffles[next(iter(self._shuffles))]
            cards = list(range(len(self._tasks)))
            random.Random(f"{self._seed}/{epoch}").shuffle(cards)
            self._shuffles[epoch] = cards
        return self._tasks[self._shuffles[epoch][place]]


def _counts(weights: list[float]) -> list[int]:
    """Returns how many of PATTERN choices each gets: the nearest whole numbers with that sum, and never 0."""
    total = sum(weights)
    exact = [weight / total * PATTERN for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: max(0, PATTERN - sum(counts))]:
        counts[i] += 1
    return counts


def _pattern(counts: list[int]) -> list[tuple[int, int, int]]:
    """Returns (environment, how many of it came before in the pattern, how many there are in all), evenly spread."""
    picks = [((nth + 0.5) / count, deck, nth) for deck, count in enumerate(counts) for nth in range(count)]
    return [(deck, nth, counts[deck]) for _, deck, nth in sorted(picks)]
