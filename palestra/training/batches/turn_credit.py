"""Advantages of single turns: what came from a turn on, beside what came from comparable turns of the group.

    G_t = r_t + discount r_(t+1) + discount^2 r_(t+2) + ...        the return of turn t
    A_t = (1 - weight) A + weight (G_t - mean of G over comparable turns)

with A the rollout's own advantage. With `algorithm.advantage: grpo` the difference is divided by the standard deviation
over the comparable turns, as A is. A turn that is compared with none has G_t - mean = 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from msgspec import Struct

from palestra.config.algorithm import AdvantageKind, AlgorithmConfig
from palestra.training.batches.advantages import group_advantages
from palestra.types.rollouts import Branch


class CreditSummary(Struct, frozen=True):
    """What the turns of a batch were compared with."""

    compared_share: float
    """Share of turns that were compared with another."""
    advantage_abs_mean: float
    """Mean size of the advantages of turns, before they are mixed with those of rollouts."""


class TurnCredit(Struct):
    """The advantages of the turns of a group."""

    by_row: Mapping[str, list[float]]
    """One for each turn, by the id of the row."""
    compared: int = 0
    """Number of turns that were compared with another."""

    @property
    def teaches(self) -> bool:
        return any(any(advantages) for advantages in self.by_row.values())


def credit_turns(rows: Sequence[Branch], algorithm: AlgorithmConfig) -> TurnCredit:
    """Compares the turns of a group's graded rollouts."""
    places: dict[object, list[tuple[str, int]]] = {}
    returns = {row.id: discounted(row, algorithm.turns.discount) for row in rows}
    for row in rows:
        for number, state in enumerate(_states(row, algorithm.turns.compare)):
            places.setdefault((row.agent, state), []).append((row.id, number))
    kind = AdvantageKind.GRPO if algorithm.advantage is AdvantageKind.GRPO else AdvantageKind.MEAN_BASELINE
    found = TurnCredit({row.id: [0.0] * len(row.turns) for row in rows})
    for same in places.values():
        found.compared += len(same) if len(same) > 1 else 0
        advantages = group_advantages([returns[row][number] for row, number in same], kind)
        for (row, number), advantage in zip(same, advantages, strict=True):
            found.by_row[row][number] = advantage
    return found


def mixed(advantage: float, of_turns: Sequence[float], weight: float) -> list[float]:
    return [(1 - weight) * advantage + weight * one for one in of_turns]


def discounted(row: Branch, discount: float) -> list[float]:
    """The return of each turn."""
    found, later = [], 0.0
    for turn in reversed(row.turns):
        later = turn.reward + discount * later
        found.append(later)
    return found[::-1]


def summarise(credits_: Sequence[TurnCredit]) -> CreditSummary | None:
    advantages = list(chain.from_iterable(chain.from_iterable(one.by_row.values()) for one in credits_))
    if not advantages:
        return None
    compared = sum(one.compared for one in credits_)
    return CreditSummary(compared / len(advantages), sum(map(abs, advantages)) / len(advantages))


def _states(row: Branch, compare: str) -> Iterator[object]:
    for number, turn in enumerate(row.turns):
        yield number if compare == "turn" else tuple(turn.observation if number else row.prompt)
