"""Metrics of a training step: learning, health, time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from palestra.config.train import GrpoConfig
from palestra.rollouts.group_metrics import (
    Aggregate,
    Metrics,
    average,
    environment_metrics,
    is_counted,
    label_metrics,
    mean_by_name,
    metric_name,
    reward_of,
)
from palestra.training.batches.advantages import mean_and_std, shaped_reward
from palestra.training.batches.compared_rewards import is_zero_variance
from palestra.training.batches.corrections import importance_ratio
from palestra.training.batches.grpo_batch import DropReason, TrainingBatch
from palestra.training.batches.kl_penalty import divergence
from palestra.training.policy import PolicyUpdate
from palestra.training.row_scores import row_environments
from palestra.types.rollouts import Group, Rollout, RolloutStop

# The engine's defaults: where a ratio counts as clipped unless the run's loss_config says otherwise.
CLIPS = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (0.8, 1.2)}


def step_metrics(
    groups: Sequence[Group],
    batch: TrainingBatch,
    updates: Sequence[PolicyUpdate],
    *,
    config: GrpoConfig,
    version: int,
    seconds: Mapping[str, float],
    base_logprobs: Mapping[str, Sequence[float]] | None = None,
    teacher_logprobs: Mapping[str, Sequence[float]] | None = None,
    aggregate: Aggregate = mean_by_name,
) -> Metrics:
    """Returns the metrics of one training step. `groups`: all that were played for it. `updates`: one for each
    minibatch. `version`: of the weights that the batch trained. `seconds`: by stage, as `collect`, `score`, `update`,
    `sync`, `total`."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        **reward_metrics(groups, config),
        **rollout_metrics(groups, config),
        **environment_metrics(groups, aggregate),
        **label_metrics(groups, "env", "reward", reward_of),
        **staleness_metrics(rollouts, version),
        **(segment_metrics(rollouts, batch, version) if config.asynchronous.continues else {}),
        **batch_metrics(batch),
        **correction_metrics(batch),
        **credit_metrics(batch),
        **fork_metrics(groups, config),
        **policy_metrics(batch, updates, config),
        **base_metrics(batch, base_logprobs, config),
        **teacher_metrics(groups, batch, teacher_logprobs or {}),
        **update_metrics(updates),
        **time_metrics(rollouts, batch, seconds, _token_count(base_logprobs) + _token_count(teacher_logprobs)),
    }


def reward_metrics(groups: Sequence[Group], config: GrpoConfig) -> Metrics:
    graded_G = [[rollout for rollout in group.rollouts if is_counted(rollout)] for group in groups]
    graded = [rollout for rollouts in graded_G for rollout in rollouts]
    if not graded:
        return {}
    rewards = sorted(reward_of(rollout) for rollout in graded)
    mean, std = mean_and_std(rewards)
    shaped = [shaped_reward(rollout, config.penalty, config.rollout.max_context) for rollout in graded]
    return {
        "reward/mean": mean,
        "reward/std": std,
        "reward/p10": quantile(rewards, 0.1),
        "reward/p90": quantile(rewards, 0.9),
        "reward/best_of_group": average([max(map(reward_of, rollouts)) for rollouts in graded_G if rollouts]),
        "reward/shaped_mean": average(shaped),
    }


def rollout_metrics(groups: Sequence[Group], config: GrpoConfig) -> Metrics:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {"rollouts/total": 0.0}
    failed = sum(rollout.has_failed for rollout in rollouts)
    graded = sum(is_counted(rollout) for rollout in rollouts)
    stops = Counter(rollout.stop for rollout in rollouts)
    failures = Counter(rollout.failure for rollout in rollouts if rollout.failure)
    played = [rollout for rollout in rollouts if rollout.turns]
    found = {
        "rollouts/total": float(len(rollouts)),
        "rollouts/graded": float(graded),
        "rollouts/failed": float(failed),
        "rollouts/ungraded": float(len(rollouts) - graded - failed),
        "rollouts/truncated_share": sum(rollout.is_cut for rollout in rollouts) / len(rollouts),
        **{f"stop/{stop}": stops[stop] / len(rollouts) for stop in RolloutStop},
        **{f"failure/{metric_name(kind)}": count / len(rollouts) for kind, count in sorted(failures.items())},
    }
    if config.learns_from_rewards:
        found["rollouts/zero_variance_share"] = average([float(is_zero_variance(group, config)) for group in groups])
    if played:
        lengths = [rollout.response_length for rollout in played]
        logprobs = [
            one for rollout in played for turn in rollout.all_turns for one in turn.logprobs if math.isfinite(one)
        ]
        found |= {
            "length/mean": average(lengths),
            "length/max": float(max(lengths)),
            "length/prompt_mean": average([len(rollout.prompt) for rollout in played]),
            "turns/mean": average([len(rollout.all_turns) for rollout in played]),
        }
        if logprobs:
            found["policy/entropy_estimate"] = -average(logprobs)
    return found


def staleness_metrics(rollouts: Sequence[Rollout], version: int) -> Metrics:
    ages = [version - rollout.oldest_version for rollout in rollouts if rollout.turns and not rollout.has_failed]
    return {"staleness/mean": average(ages), "staleness/max": float(max(ages))} if ages else {}


def segment_metrics(rollouts: Sequence[Rollout], batch: TrainingBatch, version: int) -> Metrics:
    """Computed over all sampled tokens of rollouts that may outlive their weights."""
    turns = [turn for rollout in rollouts if not rollout.has_failed for turn in rollout.all_turns]
    played = [rollout for rollout in rollouts if rollout.turns and not rollout.has_failed]
    ages = [version - drawn for turn in turns for drawn in turn.versions]
    if not ages:
        return {}
    return {
        "staleness/token_mean": average(ages),
        "segments/continued_share": sum(one.newest_version > one.oldest_version for one in played) / len(played),
        "segments/max": float(max(_n_versions(rollout) for rollout in played)),
        "segments/inexact_share": sum(turn.inexact_tokens for turn in turns) / len(ages),
        "batch/stale_tokens": float(batch.stale_tokens),
    }


def _n_versions(rollout: Rollout) -> int:
    return len({version for turn in rollout.all_turns for version in turn.versions})


def batch_metrics(batch: TrainingBatch) -> Metrics:
    return {
        "batch/sequences": float(len(batch.sequences)),
        "batch/sampled_tokens": float(sum(sum(sequence.mask) for sequence in batch.sequences)),
        "batch/tokens": float(sum(len(sequence.tokens) for sequence in batch.sequences)),
        "batch/truncated": float(batch.truncated),
        **{f"batch/dropped_{reason}": float(batch.dropped.get(reason, 0)) for reason in DropReason},
        **({} if batch.observation_logprob is None else {"observation/logprob": batch.observation_logprob}),
    }


def credit_metrics(batch: TrainingBatch) -> Metrics:
    if (found := batch.credit) is None:
        return {}
    return {
        "credit/compared_share": found.compared_share,
        "credit/turn_advantage_abs_mean": found.advantage_abs_mean,
    }


def fork_metrics(groups: Sequence[Group], config: GrpoConfig) -> Metrics:
    if not config.rollout.branch.is_on:
        return {}
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    forks = [fork for rollout in rollouts for fork in rollout.forks]
    found = {
        "branch/forks": float(len(forks)),
        "branch/tokens": float(sum(fork.response_length for fork in forks)),
        "branch/refused_share": sum(bool(rollout.not_forked) for rollout in rollouts) / max(1, len(rollouts)),
    }
    ways: dict[tuple[str, int], list[float]] = {}
    for rollout in rollouts:
        for fork in rollout.forks:
            own = [reward_of(rollout)] if is_counted(rollout) else []
            ways.setdefault((rollout.id, fork.fork_turn), own).extend([reward_of(fork)] if is_counted(fork) else [])
    if ways:
        found["branch/states"] = float(len(ways))
        found["branch/spread"] = average([mean_and_std(rewards)[1] for rewards in ways.values()])
    return found


def correction_metrics(batch: TrainingBatch) -> Metrics:
    if (found := batch.correction) is None:
        return {}
    return {
        "correction/masked_share": found.masked_share,
        "correction/masked_sequences_share": found.masked_sequences_share,
        "correction/truncated_share": found.truncated_share,
        "correction/effective_sample_size": found.effective_sample_size,
        "correction/ratio_mean": found.ratio_mean,
    }


def policy_metrics(batch: TrainingBatch, updates: Sequence[PolicyUpdate], config: GrpoConfig) -> Metrics:
    """Compares the trainer's logprobs with the sampler's, and with those that the loss compares with, on sampled
    tokens."""
    scored = [logprobs for update in updates for logprobs in update.logprobs]
    gaps_B = _logprob_gaps(batch, scored, [sequence.logprobs for sequence in batch.sequences])
    found = _ratio_metrics(gaps_B, config)
    if config.algorithm.correction.is_on:
        gaps_B = _logprob_gaps(batch, scored, [sequence.sampler_logprobs for sequence in batch.sequences])
    found |= _mismatch_metrics([gap for gaps in gaps_B for gap in gaps])
    if found and config.algorithm.replay_routing:
        replayed = sum(update.metrics.get("routing_replayed:sum", 0.0) for update in updates)
        found["policy/routing_replayed"] = replayed / sum(len(sequence.tokens) - 1 for sequence in batch.sequences)
    return found


def _logprob_gaps(
    batch: TrainingBatch, scored: Sequence[Sequence[float]], others: Sequence[Sequence[float]]
) -> list[list[float]]:
    """Returns d = trainer - other for the sampled tokens of each sequence."""
    gaps_B: list[list[float]] = []
    for sequence, logprobs, other in zip(batch.sequences, scored, others, strict=True):
        pairs = zip(sequence.mask[1:], logprobs, other[1:], strict=True)
        gaps_B.append([trainer - compared for sampled, trainer, compared in pairs if sampled])
    return gaps_B


def _mismatch_metrics(all_gaps: Sequence[float]) -> Metrics:
    gaps = [gap for gap in all_gaps if math.isfinite(gap)]
    if not gaps:
        return {"mismatch/not_finite": float(len(all_gaps))} if all_gaps else {}
    return {
        "mismatch/not_finite": float(len(all_gaps) - len(gaps)),
        "mismatch/logprob_abs_mean": average([abs(gap) for gap in gaps]),
        "mismatch/logprob_abs_max": max(abs(gap) for gap in gaps),
        "kl/sampler_trainer": -average(gaps),
        "kl/sampler_trainer_k3": average([importance_ratio(gap) - 1.0 - gap for gap in gaps]),
    }


def _ratio_metrics(all_gaps: Sequence[Sequence[float]], config: GrpoConfig) -> Metrics:
    gaps_B = [[gap for gap in gaps if math.isfinite(gap)] for gaps in all_gaps]
    ratios = [importance_ratio(gap) for gaps in gaps_B for gap in gaps]
    if not ratios:
        return {}
    found = {
        "policy/ratio_mean": average(ratios),
        "policy/ratio_max": max(ratios),
        "policy/ratio_min": min(ratios),
    }
    loss = config.algorithm.loss
    if loss in CLIPS:
        low = config.algorithm.loss_config.get("clip_low_threshold", CLIPS[loss][0])
        high = config.algorithm.loss_config.get("clip_high_threshold", CLIPS[loss][1])
        judged = [importance_ratio(average(gaps)) for gaps in gaps_B if gaps] if loss == "gspo" else ratios
        found["policy/clip_fraction"] = average([float(not low <= ratio <= high) for ratio in judged])
    return found


def base_metrics(
    batch: TrainingBatch, base_logprobs: Mapping[str, Sequence[float]] | None, config: GrpoConfig
) -> Metrics:
    """Computed over the sequences that the base model, or another reference, has scored; a few are enough for the
    report."""
    base = base_logprobs or {}
    requested = [sequence for sequence in batch.sequences if sequence.rollout in base]
    divergences = [d for sequence in requested for d in divergence(sequence, base)]
    is_moving = config.penalty.kl and config.penalty.kl_reference_every is not None
    return {"kl/reference" if is_moving else "kl/base": average(divergences)} if divergences else {}


def teacher_metrics(
    groups: Sequence[Group], batch: TrainingBatch, teacher_logprobs: Mapping[str, Sequence[float]]
) -> Metrics:
    """Returns the reverse KL to the teachers for each token, over all and in each environment."""
    if not teacher_logprobs:
        return {}
    environments = row_environments(groups)
    found: dict[str, list[float]] = {}
    for sequence in batch.sequences:
        found.setdefault(environments[sequence.rollout], []).extend(divergence(sequence, teacher_logprobs))
    by_environment = {
        f"env/{metric_name(name)}/teacher_kl": average(values) for name, values in sorted(found.items()) if values
    }
    everything = [d for values in found.values() for d in values]
    return {"kl/teacher": average(everything), **by_environment} if everything else {}


def update_metrics(updates: Sequence[PolicyUpdate]) -> Metrics:
    """Returns what the engine and a loss of one's own reported: losses are summed over the minibatches, gradient norms
    and the metrics of such a loss averaged."""
    found: Metrics = {}
    losses = [update.metrics["loss:sum"] for update in updates if "loss:sum" in update.metrics]
    divergences = [update.metrics["divergence"] for update in updates if "divergence" in update.metrics]
    norms = [update.metrics["grad_norm"] for update in updates if "grad_norm" in update.metrics]
    if losses:
        found["loss/sum"] = math.fsum(losses)
    if divergences:
        found["distill/divergence"] = average(divergences)
    if norms:
        found |= {"optim/grad_norm": average(norms), "optim/grad_norm_max": max(norms)}
    for name in sorted({name for update in updates for name in update.custom}):
        found[f"custom/{metric_name(name)}"] = average([one.custom[name] for one in updates if name in one.custom])
    return found


def time_metrics(
    rollouts: Sequence[Rollout], batch: TrainingBatch, seconds: Mapping[str, float], scored: int = 0
) -> Metrics:
    """`scored` is the number of tokens that the base model and teachers have scored."""
    sampled = sum(one.response_length for rollout in rollouts for one in rollout.tree)
    trained = sum(len(sequence.tokens) for sequence in batch.sequences)
    found = {f"time/{stage}_s": float(spent) for stage, spent in seconds.items()}
    for stage, tokens in (("collect", sampled), ("score", scored), ("update", trained), ("total", sampled)):
        if seconds.get(stage, 0.0) > 0:
            found[f"throughput/{stage}_tokens_per_s"] = tokens / seconds[stage]
    if seconds.get("total", 0.0) > 0:
        found["time/idle_share"] = seconds.get("collect", 0.0) / seconds["total"]
    if rollouts:
        found["rollouts/sampled_tokens"] = float(sampled)
        found["time/rollout_mean_s"] = average([rollout.seconds for rollout in rollouts])
        found["time/rollout_max_s"] = max(rollout.seconds for rollout in rollouts)
    return found


def quantile(ordered: Sequence[float], share: float) -> float:
    """Returns a quantile with linear interpolation, as numpy does."""
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def _token_count(logprobs: Mapping[str, Sequence[float]] | None) -> int:
    return sum(map(len, (logprobs or {}).values()))
