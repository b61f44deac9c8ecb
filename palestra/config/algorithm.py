"""Settings of how rewards become a gradient: advantages, penalties, losses."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveInt, model_validator

from palestra.config.base import Config
from palestra.config.correction import CorrectionConfig, EntropyConfig
from palestra.config.turn_credit import TurnCreditConfig


def _function_name(name: str) -> str:
    if not all(part.strip() for part in name.partition(":")):
        raise ValueError(f"or a function of your own, as package.module:function, which {name!r} is not")
    return name


FunctionName = Annotated[str, AfterValidator(_function_name)]
"""`package.module:function`."""


class AdvantageKind(StrEnum):
    GRPO = "grpo"
    """(reward - mean) / std of the group."""
    MEAN_BASELINE = "mean_baseline"
    """reward - mean of the group (GRPO without std)."""
    LEAVE_ONE_OUT = "leave_one_out"
    """reward - mean of the others."""
    DR_GRPO = "dr_grpo"
    """As mean_baseline, and the loss divided by a constant length instead of the batch's tokens."""
    BATCH_STD = "batch_std"
    """(reward - mean of the group) / std of the step's rewards."""
    REINFORCE_PP = "reinforce++"
    """(reward - mean) / std, both of all rewards of the step."""
    MAXRL = "maxrl"
    """(reward - mean) / mean of the group: tasks that are seldom solved weigh more."""
    PASS_AT_K = "pass_at_k"
    """How much the rollout raises the best reward of `pass_k` rollouts, on average."""
    GDPO = "gdpo"
    """Each of `reward_parts` by its own mean and std of the group, then added, then by mean and std of the step."""


class PenaltyConfig(Config):
    """What is subtracted from rewards before advantages are computed. Recorded rewards stay as they were."""

    length: NonNegativeFloat = 0.0
    """Subtracted from the reward, rising linearly over the last `length_window` tokens before `max_context` (DAPO's
    soft punishment)."""
    length_window: PositiveInt = 256
    """Tokens over which the length penalty rises."""
    format: NonNegativeFloat = 0.0
    """Subtracted if the environment reports `parse_error` in its metrics."""
    cut: NonNegativeFloat = 0.0
    """Subtracted if the last turn was cut at its token limit."""
    turn: NonNegativeFloat = 0.0
    """Subtracted for each turn after the first."""
    by_pass_rate: bool = False
    """Multiply the penalties for length and turns by the share of the group's rollouts that passed (`eval.success`):
    what is not solved yet may take as long as it takes."""
    kl: NonNegativeFloat = 0.0
    """Coefficient of the KL from the reference, by the token."""
    kl_reference_every: PositiveInt | None = None
    """The reference is the policy itself as it was at the last step that this number divides, so that it moves along.
    None: it is the base model."""
    kl_form: Literal["k1", "k2", "k3"] = "k1"
    """With d the policy's logprob minus the reference's. k1: mean of d - d is added to a token's advantage, as in
    Tinker's cookbook. k2, k3: the gradient of d² / 2, or
    of exp(-d) + d - 1 as in GRPO's paper, in the loss."""


class AlgorithmConfig(Config):
    """How rewards become a gradient: advantages, loss, normalisation."""

    advantage: AdvantageKind | FunctionName = AdvantageKind.MEAN_BASELINE
    """How a rollout is compared with others: grpo divides by the group's standard deviation, mean_baseline does not,
    leave_one_out compares with the others' mean, dr_grpo also divides the loss by a constant length; batch_std,
    reinforce++, maxrl, pass_at_k and gdpo: docs/grpo.md has formulas. Or a function of one's own,
    `package.module:function`."""
    pass_k: PositiveInt = 4
    """pass_at_k: of how many rollouts the best counts; 1 is leave_one_out."""
    reward_parts: dict[str, float] = Field(default={})
    """gdpo: weights of the rewards that are normalised apart, by the name of a metric that the environment reports, or
    `reward`."""
    loss: Literal["importance_sampling", "ppo", "cispo", "dro", "gspo", "sapo", "gmpo"] | FunctionName = (
        "importance_sampling"
    )
    """The policy-gradient loss, as Tinker names them. sapo, gmpo and functions of one's own,
    `package.module:function`, run in the trainer's process."""
    loss_config: dict[str, float] = Field(default={})
    """Settings of the loss, such as clip_low_threshold and clip_high_threshold of ppo, or keyword arguments of one's
    own function."""
    observation_loss: NonNegativeFloat = 0.0
    """Coefficient of a loss on what the environment said: the policy also learns to predict observations after the
    first prompt (ECHO). 1: a token that was read weighs as much as a sampled one with an advantage of 1."""
    span_weight: NonNegativeFloat = 0.0
    """What rewards for parts of turns count: the advantage of a token grows by this times what the reward of its span
    is above the mean of all spans of the group. 0: they are left out."""
    turns: TurnCreditConfig = TurnCreditConfig()
    correction: CorrectionConfig = CorrectionConfig()
    entropy: EntropyConfig = EntropyConfig()
    normalize: Literal["tokens", "sequences", "none"] = "tokens"
    """Losses are sums: divide the advantages by the number of tokens that were played for the step; by the tokens of
    each sequence, then by the number of sequences that were played; or not at all. Groups without variance count."""
    minibatches: PositiveInt = 1
    """Optimizer steps in one training step."""
    replay_routing: bool = False
    """For mixtures of experts: train with the experts that were visited while sampling, so that both compute the same
    function even where their numerics differ."""
    shuffle_rewards: bool = False
    """For a control experiment: rewards are shuffled within a batch, so that nothing can be learned."""

    @model_validator(mode="after")
    def _rewards_are_one_or_several(self) -> AlgorithmConfig:
        is_gdpo = self.advantage is AdvantageKind.GDPO
        if is_gdpo and not self.reward_parts:
            raise ValueError("advantage 'gdpo' needs reward_parts, such as {reward: 1.0, format_ok: 0.5}")
        if self.reward_parts and not is_gdpo:
            raise ValueError("reward_parts are for advantage 'gdpo' only")
        if is_gdpo and self.shuffle_rewards:
            raise ValueError("shuffle_rewards shuffles one reward; advantage 'gdpo' has several")
        if self.observation_loss and self.loss not in ("importance_sampling", "ppo", "cispo"):
            raise ValueError(
                f"observation_loss goes with the losses importance_sampling, ppo and cispo, and not with {self.loss}"
            )
        if self.span_weight and self.shuffle_rewards:
            raise ValueError("shuffle_rewards shuffles rewards of rollouts; those of spans would reveal them")
        if self.turns.is_on and self.shuffle_rewards:
            raise ValueError("shuffle_rewards shuffles rewards of rollouts; those of turns would reveal them")
        return self
