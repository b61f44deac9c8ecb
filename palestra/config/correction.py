"""Settings of off-policy corrections and of the entropy bonus."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, model_validator

from palestra.config.base import Config


def _ordered(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] >= bounds[1]:
        raise ValueError(f"the lower bound ({bounds[0]:g}) must be below the upper one ({bounds[1]:g})")
    return bounds


RatioBounds = Annotated[tuple[NonNegativeFloat, PositiveFloat], AfterValidator(_ordered)]
"""Lower and upper bound of a ratio; both are still inside."""


class CorrectionConfig(Config):
    """Corrections for tokens to which sampler and trainer give different probabilities. If one is on, the trainer's own
    log-probabilities are computed before the update, and each token's advantage is multiplied by its ratio, the
    trainer's probability / the sampler's, within these bounds. See docs/grpo.md."""

    truncate: PositiveFloat | None = None
    """The largest weight of a token: its advantage is multiplied by min(ratio, this) (truncated importance sampling).
    None: weights are not truncated."""
    token_mask: RatioBounds | None = None
    """[low, high]: tokens whose ratio is outside teach nothing (IcePop)."""
    sequence_mask: RatioBounds | None = None
    """[low, high]: sequences whose geometric mean of ratios is outside teach nothing."""
    divergence: float | None = Field(default=None, gt=0, lt=1)
    """Tokens whose probability differs by more than this between trainer and sampler teach nothing if the update would
    move it further away (DPPO's bound on the binary total variation)."""

    @property
    def is_on(self) -> bool:
        return self != CorrectionConfig()


class EntropyConfig(Config):
    """What keeps the policy exploring: an entropy bonus, constant or adapted to a target."""

    bonus: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus, which is added to each token's advantage. With a `target`: its first value."""
    target: NonNegativeFloat | None = None
    """Entropy to hold, in nats per token: after each step the coefficient grows by `rate` if
    `policy/entropy_estimate` is below the target, and falls by `rate` otherwise. None: the coefficient is constant."""
    rate: PositiveFloat = 0.005
    """Change of the coefficient after each step, if there is a `target`."""
    max_bonus: PositiveFloat = 0.1
    """Largest coefficient that a `target` leads to."""

    @model_validator(mode="after")
    def _starts_in_range(self) -> EntropyConfig:
        if self.target is not None and self.bonus > self.max_bonus:
            raise ValueError(f"bonus ({self.bonus:g}) must not be above max_bonus ({self.max_bonus:g})")
        return self
