"""Requests and collects the groups of a step of a synchronous run; groups with nothing to train on are replaced by
others. The requests of an asynchronous run are made in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from palestra.config.train import GrpoConfig
from palestra.environments.task_order import TaskOrder
from palestra.rollouts.policy_sampler import PolicySampler
from palestra.rollouts.seeds import group_seeds
from palestra.rollouts.sources import RolloutSource, RolloutSourceError
from palestra.runs.listener import RunListener, Stage
from palestra.training.batches.compared_rewards import is_zero_variance
from palestra.training.collecting.difficulty import TaskFilter
from palestra.types.rollouts import Group, GroupRequest


class RequestMaker:
    """Makes the requests for groups: which tasks, in which order, with which seeds."""

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


class AllRolloutsFailed(RolloutSourceError):
    """Nothing could be graded, so that a step has nothing to learn from."""

    def __init__(self, message: str, groups: Sequence[Group]) -> None:
        super().__init__(message)
        self.groups = groups
        """Groups that were played and are not recorded yet."""


class Collector:
    def __init__(
        self, config: GrpoConfig, source: RolloutSource, requests: RequestMaker, listener: RunListener
    ) -> None:
        self._config, self._source, self._requests, self._listener = config, source, requests, listener

    @property
    def pending(self) -> list[int]:
        """Positions left over from an asynchronous run that this one continues; a synchronous step itself uses all that
        it begins."""
        return self._requests.pending

    async def collect(self, step: int, sampler: PolicySampler) -> list[Group]:
        """Returns all groups that were played, including those with nothing to learn, in the order they were
        requested."""
        count = self._config.rollout.groups_per_step
        refills = self._config.data.max_refills if self._config.data.zero_variance == "refill" else 0
        played = await self._play(count, step, sampler, 0)
        for _ in range(refills):
            raise_if_all_failed(played, self._config)
            informative = sum(not is_zero_variance(group, self._config) for group in played)
            if informative >= count:
                break
            wanted = count - informative
            if self._config.data.refill_ahead:
                wanted = min(count, -(-wanted * len(played) // max(1, informative)))
            played += await self._play(wanted, step, sampler, informative)
        raise_if_all_failed(played, self._config)
        return played

    async def _play(self, count: int, step: int, sampler: PolicySampler, informative: int) -> list[Group]:
        """`informative`: groups of earlier rounds that teach something."""
        requests = [self._requests.next(step) for _ in range(count)]
        groups: dict[str, Group] = {}
        groups_needed = self._config.rollout.groups_per_step
        self._listener.stage(Stage.COLLECT, informative, groups_needed)
        async for group in self._source.play(requests, sampler):
            groups[group.id] = group
            self._listener.stage(Stage.COLLECT, min(informative + len(groups), groups_needed), groups_needed)
        return [groups[request.id] for request in requests]


def raise_if_all_failed(groups: Sequence[Group], config: GrpoConfig) -> None:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts or any(rollout.is_graded for rollout in rollouts):
        return
    if not config.learns_from_rewards and not all(rollout.has_failed for rollout in rollouts):
        return
    (reason, count), *_ = Counter(f"{rollout.stop}: {rollout.error}" for rollout in rollouts).most_common(1)
    raise AllRolloutsFailed(
        f"none of {len(rollouts)} rollouts could be graded; {count} of them: {reason}. "
        "They are in the run's rollouts; fix the cause and continue with --resume",
        groups,
    )
