"""Losses that ship beside those of the engine. They are functions like a user's own: `algorithm.loss: sapo` is short
for `palestra.training.trainer_losses:sapo`, and works with any Tinker server.

With r = exp(lp - old) of a token and A its advantage, both losses are minus the sum of

sapo   A f(r), f(r) = 4 / tau sigmoid(tau (r - 1)), tau by the sign of A          Qwen team 2025
gmpo   A times the geometric mean of the clipped r of the token's sequence         Zhao et al. 2025
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from palestra.training.custom_functions import LossSequence

LossFound = tuple[Tensor, dict[str, float]]


def sapo(
    logprobs: Sequence[Tensor],
    sequences: Sequence[LossSequence],
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> LossFound:
    """Soft adaptive policy optimisation: the pull of a token fades with its distance from the old policy instead of
    being cut off; that of negative advantages fades sooner."""
    ratios, advantages = torch.cat(_ratios(logprobs, sequences)), torch.cat([one.advantages for one in sequences])
    tau = torch.full_like(ratios, tau_negative).masked_fill(advantages > 0, tau_positive)
    gate = 4 / tau * torch.sigmoid(tau * (ratios - 1))
    return -(gate * advantages).sum(), {}


def gmpo(
    logprobs: Sequence[Tensor], sequences: Sequence[LossSequence], clip_low: float = 0.4, clip_high: float = 0.4
) -> LossFound:
    """Geometric-mean policy optimisation: one token with an extreme ratio moves its sequence little. Bounds are those
    of log r, by the token; they hold where they make the objective smaller, as in PPO."""
    total, clipped, count = torch.zeros(()), 0.0, 0.0
    for own, one in zip(logprobs, sequences, strict=True):
        sign = torch.sign(one.advantages.sum())
        move = sign * torch.where(one.mask, own - one.old_logprobs, 0.0)
        kept = sign * torch.minimum(move, move.clamp(-clip_low, clip_high))
        total = total - (kept.sum() / one.mask.sum().clamp_min(1)).exp() * one.advantages.sum()
        clipped, count = clipped + float((move > clip_high).sum()), count + float(one.mask.sum())
    return total, {"clipped": clipped / max(count, 1.0)}


def _ratios(logprobs: Sequence[Tensor], sequences: Sequence[LossSequence]) -> list[Tensor]:
    return [
        torch.where(one.mask, own - one.old_logprobs, 0.0).exp() for own, one in zip(logprobs, sequences, strict=True)
    ]
