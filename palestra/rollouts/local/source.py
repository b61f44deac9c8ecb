"""A source of rollouts that are played in this process, each at its own speed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from palestra.chat import ChatTokenizer
from palestra.config.train import GrpoConfig
from palestra.rollouts.concurrent import ConcurrentRollouts
from palestra.rollouts.gym.player import GymPlayer
from palestra.rollouts.local.first_turns import FirstTurns, FirstTurnsOfGroups
from palestra.rollouts.local.following_limit import FollowingLimit
from palestra.rollouts.local.forks import ForkState, ForkStates, fork_records
from palestra.rollouts.local.lockstep import BatchedRollouts
from palestra.rollouts.local.player import PlayerContext, play_fork, play_rollout
from palestra.rollouts.local.slots import RolloutSlots
from palestra.rollouts.policy_sampler import PolicySampler
from palestra.rollouts.rollout_loop import Environments, RolloutSettings
from palestra.rollouts.seeds import more_seeds
from palestra.rollouts.sources import RolloutSource
from palestra.types.rollouts import Group, GroupRequest, Rollout


class LocalRollouts:
    """Plays rollouts concurrently. `play` may be called again while it runs: `concurrency` is the limit for all
    together."""

    def __init__(
        self,
        context: PlayerContext,
        gyms: Mapping[str, GymPlayer] | None = None,
        following: FollowingLimit | None = None,
    ) -> None:
        """`gyms` are the players of environments that gym servers play, by the environment's name. `following` says how
        many rollouts are played at once; without it, the settings do."""
        self._context = context
        self._gyms = gyms or {}
        self._concurrent = ConcurrentRollouts()
        self._following = following
        self._slots = RolloutSlots(context.settings.most_at_once) if following is None else following.slots

    def play(self, requests: Sequence[GroupRequest], sampler: PolicySampler) -> AsyncIterator[Group]:
        requests = [self._oversampled(request) for request in requests]
        first_turns = FirstTurnsOfGroups(requests, sampler)
        if self._following is not None:
            self._following.begin()

        async def play_one(request: GroupRequest, index: int) -> Rollout:
            gym = self._gyms.get(request.task.environment)
            forking = ForkStates(self._context.settings.branch) if self._context.settings.branch.is_on else None
            async with self._slots:
                if gym is None:
                    own = first_turns.of(request)
                    rollout = await play_rollout(self._context, request, index, sampler, own, forking=forking)
                else:
                    rollout = await gym.play(request, index, sampler, self._context.settings)
                    rollout.not_forked = "it is played by servers of a gym" if forking else ""
            if self._following is not None and rollout.turns:
                self._following.note_length(rollout.context_length)
            if forking is not None and gym is None:
                await self._fork(request, rollout, forking, sampler)
            return rollout

        return self._concurrent.play(requests, play_one, self._context.settings.oversample)

    def _oversampled(self, request: GroupRequest) -> GroupRequest:
        seeds = more_seeds(request.seeds, self._context.settings.oversample)
        return msgspec.structs.replace(request, seeds=seeds)

    async def _fork(self, request: GroupRequest, rollout: Rollout, states: ForkStates, sampler: PolicySampler) -> None:
        """Plays the forks of a rollout that has ended. Each is a rollout for `concurrency`."""
        width = self._context.settings.branch.width

        async def play_one(fork: Rollout, state: ForkState, place: int, first_turns: FirstTurns) -> Rollout:
            async with self._slots:
                return await play_fork(self._context, request.task, fork, state, place, first_turns)

        forks = []
        for state in states.choose(rollout):
            first_turns = FirstTurns(sampler, range(width))
            for place, fork in enumerate(fork_records(rollout, state, width)):
                forks.append((fork.id, play_one(fork, state, place, first_turns)))
        rollout.forks = await self._concurrent.together(forks)

    async def close(self) -> None:
        await self._concurrent.close()
        if self._following is not None:
            await self._following.close()


def open_source(
    config: GrpoConfig,
    tokenizer: ChatTokenizer,
    environments: Environments,
    settings: RolloutSettings | None = None,
    gyms: Mapping[str, GymPlayer] | None = None,
    following: FollowingLimit | None = None,
) -> RolloutSource:
    """Opens the source of a config. Without `settings` those of training are used; evaluation passes
    `RolloutSettings.of(config.rollout, temperature)`. `following`: see `LocalRollouts`."""
    context = PlayerContext(tokenizer, environments, settings or RolloutSettings.of(config.rollout))
    return BatchedRollouts(context) if config.rollout.style == "batched" else LocalRollouts(context, gyms, following)
