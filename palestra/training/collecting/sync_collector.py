"""Collects groups for one step of a synchronous run; groups with nothing to train on are replaced by others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from palestra.config.train import GrpoConfig
from palestra.rollouts.policy_sampler import PolicySampler
from palestra.rollouts.sources import RolloutSource, RolloutSourceError
from palestra.runs.listener import RunListener, Stage
from palestra.training.batches.compared_rewards import is_zero_variance
from palestra.training.collecting.requests import RequestMaker
from palestra.types.rollouts import Group


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
