"""A source whose rollouts are worth what the config says of the limits that ended them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from palestra.config.endings import EndingsConfig
from palestra.rollouts.policy_sampler import PolicySampler
from palestra.rollouts.sources import RolloutSource
from palestra.types.rollouts import Group, GroupRequest, Rollout


class EndedRollouts:
    def __init__(self, source: RolloutSource, endings: EndingsConfig) -> None:
        self._source, self._endings = source, endings

    async def play(self, requests: Sequence[GroupRequest], sampler: PolicySampler) -> AsyncIterator[Group]:
        async for group in self._source.play(requests, sampler):
            for rollout in group.all_rollouts:
                worth = self._endings.worth(rollout.ending)
                if not isinstance(worth, str):
                    _reward(rollout, worth)
            yield group

    async def close(self) -> None:
        await self._source.close()


def _reward(rollout: Rollout, reward: float) -> None:
    """Sets the reward in place of everything that the rollout was given on its way."""
    rollout.reward, rollout.agent_rewards = reward, {}
    for turn in rollout.all_turns:
        turn.reward = 0.0
        turn.spans = []
