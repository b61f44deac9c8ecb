"""Sources of rollouts: the interface between the trainer and those who play.

Owns: the protocols, and the first record of a rollout. Local environments, remote episodes and gym servers stand behind
it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from palestra.training.policy import PolicySampler
from palestra.training.state import RunState
from palestra.types.rollouts import Group, GroupRequest, Rollout, RolloutStop

ERROR_LENGTH = 500  # of an error in a record: a line to read, not a page


class RolloutSource(Protocol):
    def play(self, requests: Sequence[GroupRequest], sampler: PolicySampler) -> AsyncIterator[Group]:
        """Every requested group once, in the order they finish. A rollout that fails is a record in its group;
        only what makes further playing senseless is raised."""
        ...

    async def close(self) -> None: ...


class RolloutLedger(Protocol):
    """A source that keeps what was played until it is safe in a checkpoint."""

    def settled(self, state: RunState) -> int:
        """The cursor to save with this state: everything up to it is used, or set aside."""
        ...

    async def commit(self, cursor: int) -> None:
        """The checkpoint is safe: what is up to it may be forgotten."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """Metrics of what was delivered since the last time."""
        ...


def blank_rollout(request: GroupRequest, index: int, seed: int, stop: RolloutStop = RolloutStop.DONE) -> Rollout:
    return Rollout(
        id=f"{request.id}-{index}",
        group=request.id,
        index=index,
        task=request.task.id,
        environment=request.task.environment,
        seed=seed,
        stop=stop,
    )


def lost_rollouts(request: GroupRequest, stop: RolloutStop, reason: str) -> list[Rollout]:
    """Records of a group that came to nothing."""
    rollouts = [blank_rollout(request, index, seed, stop) for index, seed in enumerate(request.seeds)]
    for rollout in rollouts:
        rollout.error = reason[:ERROR_LENGTH]
    return rollouts
