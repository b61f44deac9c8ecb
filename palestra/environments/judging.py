"""Rewards from judges: which environment's rollouts are graded by whom, and what becomes of their own rewards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from palestra.config.environment_entries import EnvironmentEntry, JudgedReward
from palestra.config.judges import JudgeConfig
from palestra.environments.judge import Judge
from palestra.types.rollouts import Group, Rollout

CACHE, LOG = "judge-cache.jsonl", "judge-calls.jsonl"


class Judges:
    """The judges of a run; `open` makes it."""

    def __init__(self, judges: Mapping[str, Judge], rewards: Mapping[str, JudgedReward]) -> None:
        self._judges, self._rewards = judges, rewards

    @property
    def are_idle(self) -> bool:
        """Whether no environment is graded by a judge."""
        return not self._rewards

    @classmethod
    @asynccontextmanager
    async def open(
        cls, judges: Mapping[str, JudgeConfig], environments: Sequence[EnvironmentEntry], run: Path
    ) -> AsyncIterator[Judges]:
        """Opens those that an environment names; `run` is the folder of the run. Raises JudgeError."""
        rewards = {entry.name: entry.reward for entry in environments if entry.reward is not None}
        async with AsyncExitStack() as stack:
            opened = {
                name: await stack.enter_async_context(Judge.open(name, judges[name], run.parent / CACHE, run / LOG))
                for name in sorted({reward.judge for reward in rewards.values()})
            }
            yield cls(opened, rewards)

    async def grade(self, group: Group) -> None:
        """Gives the rollouts of a group their rewards, if a judge grades their environment. A rollout that failed stays
        as it is. Raises JudgeError."""
        reward = self._rewards.get(group.task.environment)
        if reward is None:
            return
        rollouts = [rollout for rollout in group.all_rollouts if not rollout.has_failed and rollout.messages]
        judgements = await self._judges[reward.judge].grade(group.task, rollouts)
        for rollout, judgement in zip(rollouts, judgements, strict=True):
            rollout.judgement = {**msgspec.to_builtins(judgement), "own_reward": rollout.reward}
            rollout.reward = _mixed(rollout, judgement.score, reward)
            if judgement.score is not None:
                rollout.metrics = {**rollout.metrics, "judge_score": judgement.score}

    def take_metrics(self) -> dict[str, float]:
        """Returns what all judges together have spent since the last call."""
        if not self._judges:
            return {}
        counts = [judge.take_counts() for judge in self._judges.values()]
        return {
            "judge/calls": float(sum(one.calls for one in counts)),
            "judge/tokens": float(sum(one.tokens for one in counts)),
            "judge/cached": float(sum(one.cached for one in counts)),
            "judge/failed": float(sum(one.failed for one in counts)),
        }


def _mixed(rollout: Rollout, score: float | None, reward: JudgedReward) -> float | None:
    if score is None or (reward.own_weight and rollout.reward is None):
        return None
    return reward.weight * score + reward.own_weight * (rollout.reward or 0.0)
