"""The part of a run's config that bounds what one update may do to the policy."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from palestra.config.base import Config


class UpdateGuardConfig(Config):
    """Undoes updates that move the policy too far. See docs/grpo.md."""

    enabled: bool = True
    """Whether every update is measured before its weights are published."""
    max_kl: PositiveFloat = 0.02
    """Maximum KL per token between the policy before and after a step's update, over what was played for it. An update
    above it is undone and repeated at half the learning rate, up to three times; then the step is skipped."""
    rows: PositiveInt = 48
    """Number of played rows by which an update is measured, chosen at random; all of them if there are fewer."""
