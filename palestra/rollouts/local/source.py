"""A source of rollouts that are played in this process, each at its own speed.

Owns: how many are played at once, which style of playing a config means. Never touches: how one is played (`player`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from palestra.chat import ChatTokenizer
from palestra.config.train import GrpoConfig
from palestra.rollouts.concurrent import ConcurrentRollouts
from palestra.rollouts.gym.player import GymPlayer
from palestra.rollouts.local.first_turns import FirstTurnsOfGroups
from palestra.rollouts.local.lockstep import BatchedRollouts
from palestra.rollouts.local.player import PlayerContext, play_rollout
from palestra.rollouts.policy_sampler import PolicySampler
from palestra.rollouts.rollout_loop import Environments, RolloutSettings
from palestra.rollouts.sources import RolloutSource
from palestra.types.rollouts import Group, GroupRequest, Rollout


class LocalRollouts:
    """Plays rollouts concurrently. `play` may be called again while it runs: `concurrency` is the limit for all
    together."""

    def __init__(self, context: PlayerContext, gyms: Mapping[str, GymPlayer] | None = None) -> None:
        """`gyms` are the players of environments that gym servers play, by the environment's name."""
        self._context = context
        self._gyms = gyms or {}
        self._concurrent = ConcurrentRollouts()
        self._slots = asyncio.Semaphore(context.settings.concurrency)

    def play(self, requests: Sequence[GroupRequest], sampler: PolicySampler) -> AsyncIterator[Group]:
        first_turns = FirstTurnsOfGroups(requests, sampler)

        async def play_one(request: GroupRequest, index: int) -> Rollout:
            gym = self._gyms.get(request.task.environment)
            async with self._slots:
                if gym is not None:
                    return await gym.play(request, index, sampler, self._context.settings)
                return await play_rollout(self._context, request, index, sampler, first_turns.of(request))

        return self._concurrent.play(requests, play_one)

    async def close(self) -> None:
        await self._concurrent.close()


def open_source(
    config: GrpoConfig,
    tokenizer: ChatTokenizer,
    environments: Environments,
    settings: RolloutSettings | None = None,
    gyms: Mapping[str, GymPlayer] | None = None,
) -> RolloutSource:
    """Opens the source of a config. Without `settings` those of training are used; evaluation passes
    `RolloutSettings.of(config.rollout, temperature)`."""
    context = PlayerContext(tokenizer, environments, settings or RolloutSettings.of(config.rollout))
    return BatchedRollouts(context) if config.rollout.style == "batched" else LocalRollouts(context, gyms)
