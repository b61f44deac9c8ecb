"""The coefficient of the entropy bonus: constant, or adapted after each step to hold a target."""

from __future__ import annotations

from collections.abc import Mapping

from palestra.config.correction import EntropyConfig
from palestra.runs.run_state import RunState

MEASURED = "policy/entropy_estimate"
"""The metric that is compared with the target."""


def entropy_bonus(config: EntropyConfig, state: RunState) -> float:
    """Returns the coefficient of the next step."""
    return config.bonus if config.target is None or state.entropy_bonus is None else state.entropy_bonus


def adapt_entropy_bonus(config: EntropyConfig, state: RunState, metrics: Mapping[str, float]) -> None:
    """Changes the coefficient by the entropy of a step, if there is a target and something was sampled."""
    if config.target is None:
        state.entropy_bonus = None
        return
    bonus, entropy = entropy_bonus(config, state), metrics.get(MEASURED)
    if entropy is not None:
        bonus += config.rate if entropy < config.target else -config.rate
    state.entropy_bonus = min(max(bonus, 0.0), config.max_bonus)
