"""Kinds of advisories, with what usually causes each and what to try."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class AdvisoryKind(StrEnum):
    """Kinds of advisories, the most urgent first."""

    NOT_FINITE = "not_finite"
    EVALUATION_FELL = "evaluation_fell"
    REWARD_WITHOUT_EVALUATION = "reward_without_evaluation"
    """The reward rises while the evaluation falls."""
    UPDATE_UNDONE = "update_undone"
    UPDATE_KL = "update_kl"
    GRADIENT_NORM = "gradient_norm"
    SEVERE_MISMATCH = "severe_mismatch"
    MISMATCH = "mismatch"
    NOTHING_TO_TRAIN = "nothing_to_train"
    ZERO_VARIANCE = "zero_variance"
    FEW_INFORMATIVE_GROUPS = "few_informative_groups"
    FAILED_ROLLOUTS = "failed_rollouts"
    TRUNCATED = "truncated"
    ENTROPY_NEAR_ZERO = "entropy_near_zero"
    ENTROPY_FALLING = "entropy_falling"
    REWARD_STALLED = "reward_stalled"
    IDLE = "idle"
    NO_PROGRESS = "no_progress"
    LOW_DISK = "low_disk"


K = AdvisoryKind


class Guidance(NamedTuple):
    cause: str
    """What usually causes it."""
    remedy: str
    """What to try; keys of the config are in backticks."""


TOO_HARD = Guidance(
    "the tasks are too hard for the model as it is, or the reward cannot tell answers apart",
    "use easier tasks or larger groups (`rollout.group_size`), let the model imitate solutions first (`imitation`), or "
    "check the reward: palestra rollout list RUN --step N",
)
TOO_EASY = Guidance(
    "nearly all rollouts solve their tasks",
    "use harder tasks, choose them by `difficulty`, or stop when they are solved (`early_stop`)",
)
DROPPED = {
    "overlong": Guidance("the last turns of most rollouts are cut", "raise `rollout.max_tokens`"),
    "prompt_too_long": Guidance("prompts leave no room for an answer", "raise `data.max_sequence_length`"),
    "failed": Guidance(
        "most rollouts failed",
        "read their errors (palestra rollout list RUN --step N --where 'error!=None'); if calls are slow, raise "
        "`rollout.env_timeout_s`",
    ),
}
"""Why a step has nothing to train on, by the reason for which most of its rollouts were left out; for `zero_variance`
see `TOO_HARD` and `TOO_EASY`."""
IDLE_ASYNC = Guidance(
    "players cannot keep up with the trainer",
    "play more at a time (`rollout.concurrency`), allow older rollouts (`asynchronous.max_staleness`), or shorten them "
    "(`rollout.max_context`)",
)
UPDATE_TOO_LARGE = Guidance(
    "the learning rate is too high for what the step had to learn from: few groups, or tokens that the policy had held "
    "unlikely",
    "lower `optimizer.lr`, let it fall (`optimizer.schedule`), or play more groups (`rollout.groups_per_step`)",
)

GUIDANCE: dict[AdvisoryKind, Guidance] = {
    K.NOT_FINITE: Guidance(
        "the weights have overflowed after updates that were too large",
        "go back to an earlier checkpoint, and lower `optimizer.lr` or `optimizer.grad_clip`",
    ),
    K.EVALUATION_FELL: Guidance(
        "an update that was too large has undone what was learned, or training goes on after the tasks are learned",
        "use the best checkpoint (RUN@best); lower `optimizer.lr`, let it fall (`optimizer.schedule`), or stop earlier "
        "(`early_stop`)",
    ),
    K.REWARD_WITHOUT_EVALUATION: Guidance(
        "the policy games the reward, or learns the training tasks by heart",
        "read rollouts with a high reward (palestra rollout list RUN --step N) and mend what grades them; play more "
        "tasks (`environments`), set `penalty.kl`, or stop earlier (`early_stop`)",
    ),
    K.UPDATE_UNDONE: UPDATE_TOO_LARGE,
    K.UPDATE_KL: UPDATE_TOO_LARGE,
    K.GRADIENT_NORM: Guidance(
        "a few unusual rollouts or rows, or a learning rate that is too high",
        "look at what this step has trained on (palestra rollout list RUN --step N); lower `optimizer.lr` or "
        "`optimizer.grad_clip`, or begin more slowly (`optimizer.warmup_steps`)",
    ),
    K.SEVERE_MISMATCH: Guidance(
        "rollouts are much older than the weights, or the sampler is another engine or has other weights",
        "lower `asynchronous.max_staleness` or `algorithm.minibatches`, correct for it (`algorithm.correction`), or "
        "train at a server that samples by itself (`server`)",
    ),
    K.MISMATCH: Guidance(
        "the sampler is another engine (such as vLLM) or rounds differently; with Palestra's own sampler it is a bug",
        "train at a server that samples by itself (`server`); for a mixture of experts set `algorithm.replay_routing`",
    ),
    K.ZERO_VARIANCE: Guidance(
        "the tasks are too easy or too hard",
        "choose tasks by `difficulty`, or play larger groups (`rollout.group_size`)",
    ),
    K.FEW_INFORMATIVE_GROUPS: Guidance(
        "most tasks are solved always or never; such a step keeps its gradient for the next one",
        "play more groups in a step (`rollout.groups_per_step`), play others instead of those that teach nothing "
        "(`data.zero_variance`), choose tasks by `difficulty`, or change `data.min_informative_groups`",
    ),
    K.FAILED_ROLLOUTS: Guidance(
        "the environment fails, or is too slow for its time limits",
        "read their errors (palestra rollout list RUN --step N --where 'error!=None'); if it is slow, raise "
        "`rollout.env_timeout_s` or `rollout.timeout_s`",
    ),
    K.TRUNCATED: Guidance(
        "answers grow beyond the token limit, or do not come to an end",
        "raise `rollout.max_tokens`, or set `penalty.length`",
    ),
    K.ENTROPY_NEAR_ZERO: Guidance(
        "exploration was over before anything was found: the learning rate is too high, or groups are too small",
        "lower `optimizer.lr`, or play larger groups (`rollout.group_size`)",
    ),
    K.ENTROPY_FALLING: Guidance(
        "the updates are too large, and exploration will soon be over",
        "lower `optimizer.lr`, or hold the entropy (`algorithm.entropy`)",
    ),
    K.REWARD_STALLED: Guidance(
        "the tasks that are left are too hard, or the learning rate is too low",
        "choose tasks by `difficulty`, play larger groups (`rollout.group_size`), or raise `optimizer.lr`",
    ),
    K.IDLE: Guidance(
        "playing is the bottleneck: slow environments, or a few slow rollouts that all others wait for",
        "play while training (`asynchronous.enabled`), play more at a time (`rollout.concurrency`), or shorten "
        "rollouts (`rollout.max_context`)",
    ),
    K.NO_PROGRESS: Guidance(
        "rollouts hang, or the server is busy or gone",
        "look at the newest lines of its logs; lower `rollout.timeout_s` or `rollout.env_timeout_s`",
    ),
    K.LOW_DISK: Guidance(
        "rollouts, tokens and checkpoints of runs fill it",
        "delete runs that are no longer needed (palestra run delete), keep fewer checkpoints (`checkpoint.keep`), or "
        "leave tokens out (`keep_tokens`)",
    ),
}
