"""Makes the requests for groups: which ones, in which order, with which seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from palestra.environments.task_order import TaskOrder
from palestra.rollouts.seeds import group_seeds
from palestra.training.collecting.difficulty import TaskFilter
from palestra.types.rollouts import Group, GroupRequest


class RequestMaker:
    def __init__(
        self,
        order: TaskOrder,
        seed: int,
        group_size: int,
        position: int = 0,
        pending: Iterable[int] = (),
        task_filter: TaskFilter | None = None,
    ) -> None:
        self._order, self._seed, self._group_size, self._filter = order, seed, group_size, task_filter
        self.position = position
        """Position of the next new task."""
        self.pending = list(pending)
        """Earlier positions that were begun before a resume and not used: they come first."""

    def next(self, step: int) -> GroupRequest:
        if self.pending:
            return self._at(self.pending.pop(0), step)
        while self._filter is not None and not self._filter.wants(self.position, self._order[self.position]):
            self.position += 1
        self.position += 1
        return self._at(self.position - 1, step)

    def observe(self, groups: Sequence[Group]) -> None:
        """Lets the filter learn from the groups of a step."""
        if self._filter is not None:
            self._filter.observe(groups)

    def _at(self, position: int, step: int) -> GroupRequest:
        """Returns the group of a position, which is always the same, even in another step after a resume. If there are
        few tasks, one may come twice: the position distinguishes its two groups."""
        task = self._order[position if self._filter is None else self._filter.origin(position)]
        seeds = group_seeds(self._group_size, self._seed, task.id, position)
        return GroupRequest(id=f"g{position:06d}", task=task, step=step, seeds=seeds, position=position)
