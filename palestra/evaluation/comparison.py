"""Whether one evaluation is better than another: the same tasks, compared task by task."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

from msgspec import Struct

from palestra.rollouts.eval_metrics import standard_error
from palestra.runs.reader import Part, RunReader

SHUFFLES = 10_000


class PairedComparison(Struct, frozen=True, kw_only=True):
    tasks: int
    """Tasks that both have."""
    difference: float
    """Mean reward of the second less that of the first, over these tasks."""
    stderr: float
    """Standard error of the difference; smaller than those of the two, since hard tasks are hard for both."""
    p_value: float
    """Probability of a difference at least as large if the two were equally good, by swapping them at random."""
    better: int
    """Tasks at which the second has the higher mean reward."""
    worse: int


def compare_evaluations(first: RunReader, second: RunReader) -> PairedComparison | None:
    """Compares their last evaluations; None if they have no tasks in common."""
    one, other = _mean_rewards(first), _mean_rewards(second)
    differences = [other[task] - one[task] for task in sorted(one.keys() & other.keys())]
    if not differences:
        return None
    return PairedComparison(
        tasks=len(differences),
        difference=sum(differences) / len(differences),
        stderr=standard_error(differences),
        p_value=_p_value(differences),
        better=sum(difference > 0 for difference in differences),
        worse=sum(difference < 0 for difference in differences),
    )


def _mean_rewards(run: RunReader) -> dict[tuple[str, str], float]:
    """Mean rewards by environment and task, without rollouts that could not be graded."""
    if not (steps := run.steps(Part.EVAL)):
        return {}
    rewards: dict[tuple[str, str], list[float]] = defaultdict(list)
    for record in run.read_rollouts(steps[-1], Part.EVAL):
        if record["reward"] is not None:
            rewards[record["environment"], record["task"]].append(record["reward"])
    return {task: sum(found) / len(found) for task, found in rewards.items()}


def _p_value(differences: Sequence[float]) -> float:
    """Sign-flip permutation test of the sum, two-sided; the same each time."""
    changed = [difference for difference in differences if difference]
    rng, found = random.Random(0), abs(sum(changed))
    at_least = sum(
        abs(sum(one if rng.random() < 0.5 else -one for one in changed)) >= found - 1e-12 for _ in range(SHUFFLES)
    )
    return (at_least + 1) / (SHUFFLES + 1)
