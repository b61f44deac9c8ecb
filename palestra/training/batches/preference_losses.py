"""Losses of answers that people prefer or reject: their values, and their derivatives by the answers' logprobs.

For an answer of n tokens, s is the sum of its logprobs, r is s minus the same sum under the reference, and c and d are
the chosen and the rejected answer of a pair:

dpo    -log sigmoid(beta (r_c - r_d))                                                    Rafailov et al. 2023
ipo    (r_c / n_c - r_d / n_d - 1 / (2 beta))^2                                          Azar et al. 2023
simpo  -log sigmoid(beta (s_c / n_c - s_d / n_d) - target_margin)                        Meng et al. 2024
orpo   -s_c / n_c - beta log sigmoid(o_c - o_d), o = a - log(1 - e^a) with a = s / n     Hong et al. 2024
kto    1 - sigmoid(beta (r - z)) of a desirable answer, 1 - sigmoid(beta (z - r)) of     Ethayarajh et al. 2024
       another, each with its weight; z is an estimate of the KL that has no gradient

All depend on an answer by s alone. So cross entropy whose weights are minus the derivative by s has the gradient of the
loss, and no gradient has to leave the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec import Struct

from palestra.config.train import DpoConfig, PreferenceLoss

DEFAULT_BETA = {PreferenceLoss.SIMPO: 2.0}
BETA = 0.1
"""The default of all other losses, as in their papers and in TRL."""
LARGEST_MEAN = -1e-6
"""Odds of a mean logprob of 0 are infinite."""


class AnswerScore(Struct, frozen=True):
    """What a loss needs to know of an answer."""

    logprob: float
    """Sum over its tokens under the policy."""
    tokens: int
    reference: float = 0.0
    """The same sum under the reference, if the loss has one."""

    @property
    def ratio(self) -> float:
        return self.logprob - self.reference


class PairLoss(NamedTuple):
    value: float
    by_chosen: float
    """Derivative by the sum of the chosen answer's logprobs."""
    by_rejected: float
    chosen_reward: float
    """What the loss compares of the two answers."""
    rejected_reward: float

    @property
    def margin(self) -> float:
        return self.chosen_reward - self.rejected_reward


def beta_of(config: DpoConfig) -> float:
    return config.beta or DEFAULT_BETA.get(config.loss, BETA)


def uses_reference(loss: PreferenceLoss) -> bool:
    return loss not in (PreferenceLoss.SIMPO, PreferenceLoss.ORPO)


def compare(config: DpoConfig, chosen: AnswerScore, rejected: AnswerScore) -> PairLoss:
    """Returns the loss of a pair."""
    return PAIR_LOSSES[config.loss](chosen, rejected, beta_of(config), config.target_margin)


def _dpo(chosen: AnswerScore, rejected: AnswerScore, beta: float, _: float) -> PairLoss:
    rewards = beta * chosen.ratio, beta * rejected.ratio
    margin = rewards[0] - rewards[1]
    slope = beta * _sigmoid(-margin)
    return PairLoss(_softplus(-margin), -slope, slope, *rewards)


def _ipo(chosen: AnswerScore, rejected: AnswerScore, beta: float, _: float) -> PairLoss:
    rewards = chosen.ratio / chosen.tokens, rejected.ratio / rejected.tokens
    short = rewards[0] - rewards[1] - 1 / (2 * beta)
    return PairLoss(short * short, 2 * short / chosen.tokens, -2 * short / rejected.tokens, *rewards)


def _simpo(chosen: AnswerScore, rejected: AnswerScore, beta: float, target_margin: float) -> PairLoss:
    rewards = beta * chosen.logprob / chosen.tokens, beta * rejected.logprob / rejected.tokens
    short = target_margin - (rewards[0] - rewards[1])
    slope = beta * _sigmoid(short)
    return PairLoss(_softplus(short), -slope / chosen.tokens, slope / rejected.tokens, *rewards)


def _orpo(chosen: AnswerScore, rejected: AnswerScore, beta: float, _: float) -> PairLoss:
    (c, c_slope), (d, d_slope) = _log_odds(chosen), _log_odds(rejected)
    pull = beta * _sigmoid(d - c)
    value = beta * _softplus(d - c) - chosen.logprob / chosen.tokens
    return PairLoss(value, -1 / chosen.tokens - pull * c_slope, pull * d_slope, beta * c, beta * d)


PAIR_LOSSES: dict[PreferenceLoss, Callable[[AnswerScore, AnswerScore, float, float], PairLoss]] = {
    PreferenceLoss.DPO: _dpo,
    PreferenceLoss.IPO: _ipo,
    PreferenceLoss.SIMPO: _simpo,
    PreferenceLoss.ORPO: _orpo,
}


def _log_odds(answer: AnswerScore) -> tuple[float, float]:
    """Log odds of the mean logprob, and their derivative by the sum."""
    mean = min(answer.logprob / answer.tokens, LARGEST_MEAN)
    return mean - math.log(-math.expm1(mean)), -1 / math.expm1(mean) / answer.tokens


class LabelledLoss(NamedTuple):
    value: float
    by_answer: float
    """Derivative by the sum of the answer's logprobs."""
    reward: float


def judge(config: DpoConfig, answer: AnswerScore, *, is_desirable: bool, kl: float) -> LabelledLoss:
    """Returns the KTO loss of one answer. `kl` is the batch's estimate, from `estimate_kl`."""
    beta = beta_of(config)
    sign, weight = (1.0, config.desirable_weight) if is_desirable else (-1.0, config.undesirable_weight)
    missing = _sigmoid(-sign * beta * (answer.ratio - kl))
    return LabelledLoss(weight * missing, -sign * weight * beta * missing * (1 - missing), beta * answer.ratio)


def estimate_kl(mismatched: Sequence[AnswerScore]) -> float:
    """The KL between policy and reference, by answers that belong to other prompts; 0 without any."""
    if not mismatched:
        return 0.0
    return max(0.0, math.fsum(answer.ratio for answer in mismatched) / len(mismatched))


def _sigmoid(x: float) -> float:
    return 0.5 * (1.0 + math.tanh(x / 2))


def _softplus(x: float) -> float:
    """log(1 + e^x), written so that nothing overflows."""
    return max(0.0, x) + math.log1p(math.exp(-abs(x)))
