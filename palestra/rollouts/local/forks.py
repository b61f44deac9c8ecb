"""Forks of a rollout: from which of its states other ways are played on, and with which seeds.

Everything follows from the rollout's tokens and its seed: a run that is resumed plays the same forks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

from msgspec import Struct

from palestra.config.branching import BranchConfig
from palestra.environments.snapshots import WorldSnapshot
from palestra.rollouts.rollout_loop import LimitsUsed
from palestra.rollouts.seeds import derive_seed, group_seeds
from palestra.types.pictures import PictureFile, PromptPicture
from palestra.types.rollouts import Message, Rollout, RolloutStop, Turn


class ForkState(Struct):
    """A rollout before one of its turns."""

    used: LimitsUsed
    world: WorldSnapshot
    tokens: list[int]
    messages: list[Message]
    pictures: list[PromptPicture] = []
    """Those among the tokens."""
    picture_files: dict[str, PictureFile] = {}
    """Those that the messages name, by their digests."""
    reward: float = 0.0
    """Sum of the rewards of the turns before it."""

    @property
    def turn(self) -> int:
        """Number of turns before it."""
        return self.used.turns


class ForkStates:
    """The states of one rollout, before each turn from which forks may begin."""

    def __init__(self, config: BranchConfig) -> None:
        self._config = config
        self._states: dict[int, ForkState] = {}
        self.refusal = ""
        """Why the world could not be copied."""

    def wants(self, turn: int) -> bool:
        """Whether the state before this turn is to be kept; before the first one the whole group forks."""
        config = self._config
        return turn > 0 and not self.refusal and (config.at != "fixed" or turn + 1 in config.turns)

    def keep(self, state: ForkState) -> None:
        self._states[state.turn] = state

    def choose(self, rollout: Rollout) -> list[ForkState]:
        """Returns the states from which forks are played. Says in the record why there are none, if that is not due to
        its length."""
        rollout.not_forked = self.refusal
        if rollout.has_failed or self.refusal or not self._states:
            return []
        turns = rollout.turns_in_order
        chosen = _within_budget(_in_order(turns, sorted(self._states), rollout.seed, self._config), turns, self._config)
        if not chosen:
            rollout.not_forked = f"no fork fits into {self._config.budget} tokens (rollout.branch.budget)"
        rewards = list(accumulate((turn.reward for turn in turns), initial=0.0))
        for turn in chosen:
            self._states[turn].reward = rewards[turn]
        return [self._states[turn] for turn in sorted(chosen)]


def _in_order(turns: Sequence[Turn], candidates: Sequence[int], seed: int, config: BranchConfig) -> list[int]:
    """The turns that should be forked, the most important first."""
    match config.at:
        case "uncertain":
            ordered = sorted(candidates, key=lambda turn: (-surprise(turns[turn]), turn))
            return ordered[: config.points]
        case "each_turn":
            return random.Random(derive_seed(seed, "fork order")).sample(candidates, len(candidates))
        case _:
            return list(candidates)


def _within_budget(wanted: Sequence[int], turns: Sequence[Turn], config: BranchConfig) -> list[int]:
    """A fork is expected to cost what the rollout itself sampled from that turn on."""
    left, chosen = config.budget, []
    for turn in wanted:
        cost = config.width * sum(len(one.tokens) for one in turns[turn:])
        if left is not None and cost > left:
            continue
        chosen.append(turn)
        left = None if left is None else left - cost
    return chosen


def surprise(turn: Turn) -> float:
    """The mean negative logprob of its tokens, whose expectation is the entropy."""
    return -sum(turn.logprobs) / max(1, len(turn.logprobs))


def fork_records(rollout: Rollout, state: ForkState, width: int) -> list[Rollout]:
    """The records of the forks from a state, before they are played."""
    seeds = group_seeds(width, rollout.seed, "fork", state.turn)
    return [
        Rollout(
            id=f"{rollout.id}.t{state.turn + 1}.{place + 1}",
            group=rollout.group,
            index=rollout.index,
            task=rollout.task,
            environment=rollout.environment,
            seed=seed,
            stop=RolloutStop.DONE,
            temperature=rollout.temperature,
            fork_turn=state.turn,
        )
        for place, seed in enumerate(seeds)
    ]
