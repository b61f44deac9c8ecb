"""The learning rate of each step."""

from __future__ import annotations

import math

from palestra.config.train import OptimizerConfig
from palestra.types import AdamParams


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Returns the learning rate of a step; `step` counts from 0."""
    peak = config.lr
    if peak == "auto":
        raise ValueError("optimizer.lr is still auto; `auto_lr.with_learning_rates` makes it a number")
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    match config.schedule:
        case "constant":
            return peak
        case "linear":
            return peak * (1 - done)
        case "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * done))


def adam_at(config: OptimizerConfig, step: int, steps: int) -> AdamParams:
    return AdamParams(
        learning_rate=learning_rate(config, step, steps),
        beta1=config.beta1,
        beta2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        grad_clip_norm=config.grad_clip,
    )
