"""A source whose rollouts get their rewards from a function of the user's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from palestra.rollouts.policy_sampler import PolicySampler
from palestra.rollouts.sources import RolloutSource
from palestra.training.custom_functions import CustomReward
from palestra.types.rollouts import Group, GroupRequest


def with_own_reward(source: RolloutSource, reward: str | None) -> RolloutSource:
    """`reward` is `package.module:function`; without one, the source itself."""
    return source if reward is None else RewardedRollouts(source, CustomReward.load(reward))


class RewardedRollouts:
    def __init__(self, source: RolloutSource, reward: CustomReward) -> None:
        self._source, self._reward = source, reward

    async def play(self, requests: Sequence[GroupRequest], sampler: PolicySampler) -> AsyncIterator[Group]:
        async for group in self._source.play(requests, sampler):
            for rollout in group.all_rollouts:
                if rollout.is_graded:
                    rollout.reward = self._reward.of(rollout)
            yield group

    async def close(self) -> None:
        await self._source.close()
