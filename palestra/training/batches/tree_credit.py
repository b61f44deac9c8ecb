"""Advantages from forks: every turn of a rollout by what its state was worth before and after it, without a critic.

A rollout with forks before some of its turns is a path of states s_1 … s_m, in the order of play, with R its reward:

    Q_m = R,   V_j = mean of Q_j and the rewards of the forks from s_j,   Q_(j-1) = V_j

The rollout's turns from s_j to s_(j+1) have the advantage Q_j - V_j; all turns of a fork from s_j have its reward minus
V_j. The turns before s_1 are compared with the group's other rollouts, where V_1 stands in place of the reward, since
fewer chances went into it (the idea of VinePPO, Kazemnejad et al. 2024, on a tree whose leaves are trained too). With
`algorithm.advantage` grpo or leave_one_out, the ways to go on from one state are compared by that rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from msgspec import Struct, field

from palestra.config.algorithm import AdvantageKind, AlgorithmConfig
from palestra.training.batches.advantages import group_advantages
from palestra.types.rollouts import Rollout

KEPT_KINDS = (AdvantageKind.GRPO, AdvantageKind.LEAVE_ONE_OUT)


class TreeCredit(Struct):
    """The values and advantages of a group's rollouts and their forks."""

    values: dict[str, float] = field(default_factory=dict)
    """What stands in place of the reward of each rollout, by its id."""
    by_row: dict[str, list[float | None]] = field(default_factory=dict)
    """One for each turn of a row, by the row's id. None: the advantage of the whole rollout."""
    forks: set[str] = field(default_factory=set)
    """The forks that count, by id."""

    @property
    def teaches(self) -> bool:
        return any(any(advantages) for advantages in self.by_row.values())


def credit_tree(rollouts: Iterable[Rollout], rewards: Mapping[str, float], algorithm: AlgorithmConfig) -> TreeCredit:
    """`rewards`: those of the rollouts and forks that can be compared, by id. A rollout without one is left out with
    its forks."""
    found = TreeCredit()
    for rollout in rollouts:
        if rollout.id in rewards:
            _credit(rollout, rewards, algorithm, found)
    return found


def _credit(rollout: Rollout, rewards: Mapping[str, float], algorithm: AlgorithmConfig, found: TreeCredit) -> None:
    kind = algorithm.advantage if algorithm.advantage in KEPT_KINDS else AdvantageKind.MEAN_BASELINE
    assert isinstance(kind, AdvantageKind)
    forks_at: dict[int, list[Rollout]] = {}
    for fork in rollout.forks:
        if fork.id in rewards:
            forks_at.setdefault(fork.fork_turn, []).append(fork)
    value, end = rewards[rollout.id], len(rollout.turns_in_order)
    of_turns: list[float | None] = [None] * end
    for turn in sorted(forks_at, reverse=True):
        ways = [value, *(rewards[fork.id] for fork in forks_at[turn])]
        own, *others = group_advantages(ways, kind)
        of_turns[turn:end] = [own] * (end - turn)
        for fork, advantage in zip(forks_at[turn], others, strict=True):
            found.forks.add(fork.id)
            _note(fork, [advantage] * len(fork.all_turns), found)
        value, end = fmean(ways), turn
    found.values[rollout.id] = value
    _note(rollout, of_turns, found)


def _note(rollout: Rollout, of_turns: Sequence[float | None], found: TreeCredit) -> None:
    """`of_turns`: in the order of play, in which a rollout's own row comes last."""
    rest = iter(of_turns)
    for row in [*rollout.rows[1:], rollout.rows[0]]:
        found.by_row[row.id] = [next(rest) for _ in row.turns]
