"""Rules that say when the metrics of a run call for an advisory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median, pstdev
from typing import NamedTuple

from palestra.runs.advisory_guidance import DROPPED, IDLE_ASYNC, TOO_EASY, TOO_HARD, AdvisoryKind, Guidance, K
from palestra.runs.metric_table import MetricTable
from palestra.util.figures import number_text
from palestra.util.json_types import JsonObject

RECENT = 5
"""Steps that a rule looks at."""
ENOUGH = 3
"""Steps after which a share counts as lasting: single steps jump."""
USUAL = 20
"""Steps whose median is the usual value of a metric."""
STALL_STEPS = 30

MOST_ZERO_VARIANCE = 0.8
MOST_TRUNCATED = 0.3
MOST_FAILED = 0.05
SEVERE_MISMATCH_KL = 0.05
ROUNDING = 1e-4  # float32 differs by 1e-5 at most, half precision on a GPU by 0; two engines in bfloat16 by 1e-2
ENTROPY_FALL = 0.5
FALL_STEPS = 10
NO_ENTROPY = 0.02
LOW_REWARD, HIGH_REWARD = 0.5, 0.95
KL_JUMP, KL_FLOOR = 5.0, 1e-3  # the guard undoes an update at about ten times the KL of a healthy one
NORM_JUMP = 5.0
MOST_IDLE, MOST_IDLE_ASYNC = 0.9, 0.5  # a synchronous run waits whenever it plays
DROPPED_METRIC = "batch/dropped_"
ABSURD = 1e100
"""No metric is so large; arithmetic with what is in a damaged file must not overflow."""
ERRORS = 2.0
"""Standard errors that a difference of two evaluations must exceed."""


class Finding(NamedTuple):
    """What a rule has found; the guidance is that of its kind, unless it has one of its own."""

    metric: str | None
    value: float
    text: str
    step: int | None = None
    guidance: Guidance | None = None


class Curves:
    """The metrics of a run with the config that made them."""

    def __init__(self, table: MetricTable, config: JsonObject) -> None:
        self.table, self._config = table, config

    def points(self, name: str, count: int = RECENT) -> list[tuple[int, float]]:
        """The steps among the newest `count` that have the metric, with its values."""
        if (column := self.table.columns.get(name)) is None:
            return []
        pairs = zip(self.table.steps[-count:], column[-count:], strict=True)
        return [(step, value) for step, value in pairs if abs(value) < ABSURD]

    def recent(self, name: str, count: int = RECENT) -> list[float]:
        return [value for _, value in self.points(name, count)]

    def newest(self, name: str) -> float | None:
        """The metric's value in the newest step; None if that step has none."""
        return next(iter(self.recent(name, 1)), None)

    def setting(self, key: str) -> object:
        """The value of a dotted key; None if the config of this kind of run, or of an older version, has none."""
        found: object = self._config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def number(self, key: str, default: float) -> float:
        value = self.setting(key)
        return value if isinstance(value, int | float) else default


Rule = Callable[[Curves], Finding | None]


def not_finite(curves: Curves) -> Finding | None:
    count = curves.newest("mismatch/not_finite")
    if not count:
        return None
    return Finding("mismatch/not_finite", count, "Log-probabilities of sampled tokens are no numbers")


class Evaluated(NamedTuple):
    step: int
    success: float
    error: float
    """The standard error; NaN if it is not known."""


def evaluations(curves: Curves) -> list[Evaluated]:
    if "eval/success" not in curves.table.columns:
        return []
    columns = [curves.table.column(name) for name in ("eval/success", "eval/success_stderr", "eval/tasks")]
    return [
        Evaluated(step, success, evaluation_error(success, error, tasks))
        for step, success, error, tasks in zip(curves.table.steps, *columns, strict=True)
        if 0 <= success <= 1
    ]


def evaluation_error(success: float, error: float, tasks: float) -> float:
    """The standard error over tasks, the binomial one where a run has none. It is half a task at least, since that of
    equal results is computed as 0."""
    if not tasks > 0:
        return error
    return max(math.sqrt(success * (1 - success) / tasks) if math.isnan(error) else error, 0.5 / tasks)


def is_below(one: Evaluated, best: Evaluated) -> bool:
    return best.success - one.success > ERRORS * math.hypot(one.error, best.error)


def evaluation_fell(curves: Curves) -> Finding | None:
    if not (played := evaluations(curves)):
        return None
    best, last = max(played, key=lambda one: one.success), played[-1]
    if not is_below(last, best):
        return None
    text = (
        f"The evaluation is below its best, {number_text(best.success)} after step {best.step}, by more than its error"
    )
    return Finding("eval/success", last.success, text, last.step)


def reward_without_evaluation(curves: Curves) -> Finding | None:
    """Needs two evaluations in a row below the best one: one alone is more likely the work of a single update."""
    played = evaluations(curves)
    best = max(played, key=lambda one: one.success, default=None)
    if best is None or len(played) < 3 or not all(is_below(one, best) for one in played[-2:]):
        return None
    rewards = curves.points("reward/mean", len(curves.table.steps))
    before = [reward for step, reward in rewards if step <= best.step][-RECENT:]
    after = [reward for step, reward in rewards if step > best.step][-RECENT:]
    if not has_risen(before, after):
        return None
    fallen = f"{number_text(best.success)} after step {best.step} to {number_text(played[-1].success)}"
    text = f"The reward has risen from {number_text(fmean(before))} while the evaluation has fallen from {fallen}"
    return Finding("reward/mean", fmean(after), text, played[-1].step)


def has_risen(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether the mean has risen by more than single steps differ."""
    if not before or not after:
        return False
    return fmean(after) - fmean(before) > max(pstdev(before), pstdev(after))


def update_undone(curves: Curves) -> Finding | None:
    for metric, what in (("guard/skipped", "skipped"), ("guard/undone", "undone")):
        if happened := [point for point in curves.points(metric) if point[1] > 0]:
            step, count = happened[-1]
            return Finding(metric, count, f"The update of step {step} changed the policy too much and was {what}", step)
    return None


def update_kl(curves: Curves) -> Finding | None:
    return jump(curves, "guard/kl", "update moves the policy further than usual", KL_JUMP, KL_FLOOR)


def gradient_norm(curves: Curves) -> Finding | None:
    return jump(curves, "optim/grad_norm", "gradient is larger than usual", NORM_JUMP)


def jump(curves: Curves, metric: str, what: str, factor: float, floor: float = 0.0) -> Finding | None:
    """The newest of the recent steps whose value is far above the median of the steps before it."""
    points = curves.points(metric, RECENT + USUAL)
    for place in range(len(points) - 1, max(len(points) - RECENT, RECENT) - 1, -1):
        step, value = points[place]
        usual = median(value for _, value in points[max(0, place - USUAL) : place])
        if value > max(floor, factor * usual) and usual > 0:
            text = f"The {what} in step {step}, {value / usual:.0f} times the median of {number_text(usual)}"
            return Finding(metric, value, text, step)
    return None


def severe_mismatch(curves: Curves) -> Finding | None:
    divergences = curves.recent("kl/sampler_trainer_k3")
    if not divergences or median(divergences) <= SEVERE_MISMATCH_KL:
        return None
    text = f"Sampler and trainer disagree: their KL is above {SEVERE_MISMATCH_KL}"
    return Finding("kl/sampler_trainer_k3", median(divergences), text)


def mismatch(curves: Curves) -> Finding | None:
    """Compares only where sampler and trainer have the same weights; elsewhere they should differ."""
    distances = curves.recent("mismatch/logprob_abs_mean")
    is_off_policy = curves.number("algorithm.minibatches", 1) > 1 or any(curves.recent("staleness/max"))
    if is_off_policy or not distances or median(distances) <= ROUNDING:
        return None
    text = "Sampler and trainer have the same weights, but not the same log-probabilities"
    return Finding("mismatch/logprob_abs_mean", median(distances), text)


def nothing_to_train(curves: Curves) -> Finding | None:
    rows, step = curves.newest("batch/sequences"), curves.table.steps[-1]
    if rows is None or (rows > 0 and not is_kept_without_variance(curves)):
        return None
    names = [name for name in curves.table.columns if name.startswith(DROPPED_METRIC)]
    dropped = {name.removeprefix(DROPPED_METRIC): curves.newest(name) or 0.0 for name in names}
    reason = max(dropped, key=lambda one: dropped[one]) if any(dropped.values()) else "zero_variance"
    played = number_text(curves.newest("rollouts/total"))
    if reason == "zero_variance":
        guidance, what = too_easy(curves) or TOO_HARD, f"within each group its {played} rollouts have the same reward"
    else:
        guidance = DROPPED.get(
            reason, Guidance(f"most rollouts are {reason}", "look at them: palestra rollout list RUN --step N")
        )
        what = f"{number_text(dropped[reason])} of {played} rollouts are left out ({reason})"
    return Finding("batch/sequences", rows, f"Step {step} has nothing to train on: {what}", step, guidance)


def is_kept_without_variance(curves: Curves) -> bool:
    """Whether all rows of the newest step have an advantage of 0 (`data.zero_variance: keep`)."""
    others = ("teachers", "penalty.kl", "algorithm.shuffle_rewards")  # these give advantages, too
    return curves.newest("rollouts/zero_variance_share") == 1.0 and not any(map(curves.setting, others))


def too_easy(curves: Curves) -> Guidance | None:
    """The guidance for a run whose tasks are solved."""
    worst = curves.newest("reward/p10")
    return TOO_EASY if worst is not None and worst >= curves.number("eval.success", 1.0) else None


def zero_variance(curves: Curves) -> Finding | None:
    text = "Most groups teach nothing: their rewards are all equal"
    finding = lasting(curves, "rollouts/zero_variance_share", MOST_ZERO_VARIANCE, text)
    return finding and finding._replace(guidance=too_easy(curves))


def few_informative_groups(curves: Curves) -> Finding | None:
    counts = curves.points("groups/informative")
    groups = curves.number("rollout.groups_per_step", 0)
    needed = curves.number("data.min_informative_groups", math.ceil(groups / 4))
    if not counts or (fewest := min(counts, key=lambda point: point[1]))[1] >= needed:
        return None
    step, count = fewest
    text = f"Step {step} had fewer than {number_text(needed)} groups whose rewards differ"
    return Finding("groups/informative", count, text, step)


def failed_rollouts(curves: Curves) -> Finding | None:
    failed, total = sum(curves.recent("rollouts/failed")), sum(curves.recent("rollouts/total"))
    if failed <= MOST_FAILED * max(1.0, total):
        return None
    return Finding("rollouts/failed", failed, f"{failed / max(1.0, total):.0%} of the last rollouts failed")


def truncated(curves: Curves) -> Finding | None:
    return lasting(curves, "rollouts/truncated_share", MOST_TRUNCATED, "Many answers are cut at the token limit")


def lasting(curves: Curves, metric: str, most: float, text: str) -> Finding | None:
    """Whether a share is above a bound in all recent steps."""
    shares = curves.recent(metric)
    return Finding(metric, shares[-1], text) if len(shares) >= ENOUGH and min(shares) > most else None


def entropy_near_zero(curves: Curves) -> Finding | None:
    entropies, rewards = curves.recent("policy/entropy_estimate"), curves.recent("reward/mean")
    if len(entropies) < ENOUGH or not rewards or max(entropies) >= NO_ENTROPY or rewards[-1] >= LOW_REWARD:
        return None
    text = "The entropy is near 0 while the reward is low"
    return Finding("policy/entropy_estimate", entropies[-1], text)


def entropy_falling(curves: Curves) -> Finding | None:
    """Entropy that is spent on reward is well spent: only a fall without a rise of the reward counts."""
    entropies, rewards = (curves.recent(name, FALL_STEPS) for name in ("policy/entropy_estimate", "reward/mean"))
    if len(entropies) < FALL_STEPS or len(rewards) < FALL_STEPS:
        return None
    before, after = median(entropies[:ENOUGH]), median(entropies[-ENOUGH:])
    is_paid_for = has_risen(rewards[:ENOUGH], rewards[-ENOUGH:]) or fmean(rewards[-ENOUGH:]) >= HIGH_REWARD
    if after >= ENTROPY_FALL * before or is_paid_for:
        return None
    text = f"The entropy has fallen from {number_text(before)} within {FALL_STEPS} steps, and the reward has not risen"
    return Finding("policy/entropy_estimate", after, text)


def reward_stalled(curves: Curves) -> Finding | None:
    rewards = curves.recent("reward/mean", 2 * STALL_STEPS)
    before, after = rewards[:STALL_STEPS], rewards[STALL_STEPS:]
    if len(after) < STALL_STEPS or max(after) >= HIGH_REWARD or sum(after) > sum(before):
        return None
    return Finding("reward/mean", fmean(after), f"The reward has not risen for {STALL_STEPS} steps")


def idle(curves: Curves) -> Finding | None:
    is_async = bool(curves.setting("asynchronous.enabled"))
    most, guidance = (MOST_IDLE_ASYNC, IDLE_ASYNC) if is_async else (MOST_IDLE, None)
    finding = lasting(curves, "time/idle_share", most, "The trainer waits for rollouts most of the time")
    return finding and finding._replace(guidance=guidance)


RULES: Mapping[AdvisoryKind, Rule] = {
    K.NOT_FINITE: not_finite,
    K.EVALUATION_FELL: evaluation_fell,
    K.REWARD_WITHOUT_EVALUATION: reward_without_evaluation,
    K.UPDATE_UNDONE: update_undone,
    K.UPDATE_KL: update_kl,
    K.GRADIENT_NORM: gradient_norm,
    K.SEVERE_MISMATCH: severe_mismatch,
    K.MISMATCH: mismatch,
    K.NOTHING_TO_TRAIN: nothing_to_train,
    K.ZERO_VARIANCE: zero_variance,
    K.FEW_INFORMATIVE_GROUPS: few_informative_groups,
    K.FAILED_ROLLOUTS: failed_rollouts,
    K.TRUNCATED: truncated,
    K.ENTROPY_NEAR_ZERO: entropy_near_zero,
    K.ENTROPY_FALLING: entropy_falling,
    K.REWARD_STALLED: reward_stalled,
    K.IDLE: idle,
}
