"""Penalties that are subtracted from a reward before advantages: for length, turns, format and cut answers."""

from __future__ import annotations

from palestra.config.algorithm import PenaltyConfig
from palestra.types.rollouts import Branch, Rollout


def shaped_reward(rollout: Rollout, penalty: PenaltyConfig, max_context: int, pass_rate: float = 1.0) -> float:
    """Returns the reward that advantages are computed from. The rollout must be graded. `pass_rate` is its group's, by
    which the price of length and turns is multiplied with `by_pass_rate`."""
    if rollout.reward is None:
        raise ValueError(f"rollout {rollout.id} has no reward to shape")
    reward, share = rollout.reward, pass_rate if penalty.by_pass_rate else 1.0
    if penalty.length:
        reward -= share * penalty.length * overlength(rollout, penalty.length_window, max_context)
    if penalty.turn:
        reward -= share * penalty.turn * max(0, rollout.fork_turn + len(rollout.all_turns) - 1)
    if penalty.format and rollout.metrics.get("parse_error", 0.0) > 0:
        reward -= penalty.format
    if penalty.cut and rollout.is_cut:
        reward -= penalty.cut
    return reward


def overlength(rollout: Rollout, window: int, max_context: int) -> float:
    """Returns 0 up to `window` tokens before the limit, then a value that rises linearly to 1 (DAPO's soft overlong
    punishment)."""
    return min(1.0, max(0.0, (total_length(rollout) - (max_context - window)) / window))


def total_length(rollout: Rollout | Branch) -> int:
    """Returns the number of tokens of prompt, observations and samples."""
    return len(rollout.prompt) + sum(len(turn.observation) + len(turn.tokens) for turn in rollout.turns)
