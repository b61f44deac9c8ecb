"""Advice for a step with nothing to train on.

Owns: the text. Never touches: where it is shown.
"""

from __future__ import annotations

from collections.abc import Sequence

from palestra.config.train import GrpoConfig
from palestra.training.batches.grpo_batch import DropReason, TrainingBatch
from palestra.training.loops.step_metrics import is_counted
from palestra.types.rollouts import Group


def teaches_nothing(batch: TrainingBatch) -> bool:
    """Whether nothing is left to train on, or nothing with an advantage (`data.zero_variance: keep`)."""
    return not any(any(sequence.advantages) for sequence in batch.sequences)


def advise(groups: Sequence[Group], batch: TrainingBatch, config: GrpoConfig) -> str:
    """Returns why the step has nothing to learn from, and what to try."""
    count = sum(len(group.rollouts) for group in groups)
    reason = max(batch.dropped, key=lambda one: batch.dropped[one], default=DropReason.ZERO_VARIANCE)
    left_out = f"{batch.dropped.get(reason, 0)} of {count} rollouts are left out"
    match reason:
        case DropReason.ZERO_VARIANCE:
            return _about_rewards(groups, count, config)
        case DropReason.OVERLONG:
            return (
                f"{left_out}, since their last turn was cut; raise rollout.max_tokens (now {config.rollout.max_tokens})"
            )
        case DropReason.PROMPT_TOO_LONG:
            limit = config.data.max_sequence_length
            return f"{left_out}, since their prompt fills data.max_sequence_length (now {limit}); raise it"
        case _:
            return f"{left_out} ({reason}); look at their records"


def _about_rewards(groups: Sequence[Group], count: int, config: GrpoConfig) -> str:
    rewards = [rollout.reward or 0.0 for group in groups for rollout in group.rollouts if is_counted(rollout)]
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    if low >= config.eval.success:
        return f"all {count} rollouts solve their tasks (reward {low:g} or more); use harder tasks"
    if low == high:
        found = f"all {count} rollouts have the same reward ({low:g})"
    else:
        found = f"within each of the {len(groups)} groups all rollouts have the same reward ({low:g} to {high:g})"
    return (
        f"{found}; use easier tasks or larger groups (rollout.group_size, now {config.rollout.group_size}), let the "
        "model imitate solutions first (imitation), or check the reward"
    )
