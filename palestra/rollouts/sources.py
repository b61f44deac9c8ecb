"""Sources of rollouts: the interface between the trainer and those who play.

Implementations: local environments, remote episodes, gym servers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Protocol

import msgspec

from palestra.chat import ChatTokenizer
from palestra.rollouts.policy_sampler import PolicySampler
from palestra.runs.listener import RunListener
from palestra.runs.run_state import RunState
from palestra.runs.writer import RunFolder
from palestra.types.rollouts import Group, GroupRequest, Rollout, RolloutStop

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
ERROR_LENGTH = 500  # characters of an error in a record: a line to read, not a page


class RolloutSourceError(Exception):
    """No more rollouts can be played here: what plays them refuses, is missing, or does not fit the run."""


class PlayedRun(Protocol):
    """The run as its players know it."""

    run: RunFolder
    state: RunState
    tokenizer: ChatTokenizer
    listener: RunListener
    url: str
    """Address of the server."""


class RolloutSource(Protocol):
    def play(self, requests: Sequence[GroupRequest], sampler: PolicySampler) -> AsyncIterator[Group]:
        """Yields every requested group once, in the order they finish. A rollout that fails is a record in its group;
        only an error that makes further playing pointless is raised."""
        ...

    async def close(self) -> None: ...


class RolloutLedger(Protocol):
    """A source that keeps played groups until they are safe in a checkpoint."""

    def settled(self, state: RunState) -> int:
        """Returns the cursor to save with this state: everything up to it is used, or set aside."""
        ...

    async def commit(self, cursor: int) -> None:
        """Says that the checkpoint is saved: everything up to the cursor may be forgotten."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """Returns metrics of what was delivered since the last call."""
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


def set_turn_times(rollout: Rollout, times: object) -> None:
    """Notes how long each turn was sampled and the environment took afterwards, if whoever played says it of each."""
    turns = rollout.turns if isinstance(times, list) and len(times) == len(rollout.turns) else []
    try:
        pairs = msgspec.convert(times, list[tuple[Seconds, Seconds]])
    except msgspec.ValidationError:
        return
    for turn, (sample_s, env_s) in zip(turns, pairs, strict=False):
        turn.sample_s, turn.env_s = sample_s, env_s


def lost_rollouts(request: GroupRequest, stop: RolloutStop, reason: str) -> list[Rollout]:
    """Returns the records of a group that failed as a whole."""
    rollouts = [blank_rollout(request, index, seed, stop) for index, seed in enumerate(request.seeds)]
    for rollout in rollouts:
        rollout.error = reason[:ERROR_LENGTH]
    return rollouts
