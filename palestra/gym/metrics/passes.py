"""pass@k, the average of k, majority@k, and their variation. All in percent."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from palestra.gym.metrics.aggregate import deviation
from palestra.util.json_types import JsonMapping, JsonPayload

Rollout = JsonMapping
Scores = dict[str, float]
ScoreOf = Callable[[Rollout], Mapping[str, float | bool]]

STATISTICS = ("std_dev_across_runs", "std_err_across_runs", "avg_sample_std_dev")
PER_SAMPLE = "per_sample_aggregate"


class TaskScores(Struct, frozen=True):
    """One task: the scores of its rollouts, and the answer of each."""

    scores: list[Scores]
    answers: list[Any]

    def of(self, name: str, first: int | None = None) -> list[float]:
        return [one[name] for one in self.scores[:first] if name in one]


def pass_metrics(
    tasks: Sequence[Sequence[Rollout]], score: ScoreOf | None = None, answer_key: str | None = None
) -> JsonPayload:
    """Returns `pass@k/accuracy`, `pass@1[avg-of-k]/accuracy`, with `answer_key` also `majority@k/accuracy`, and
    `…/no_answer`. Without `score` the reward is the accuracy."""
    score = score or (lambda rollout: {"accuracy": rollout["reward"]})
    scored = [_scored(task, score, answer_key) for task in tasks if task]
    if not scored:
        return {}
    names = sorted({name for task in scored for one in task.scores for name in one})
    most = max(len(task.scores) for task in scored)
    metrics: dict[str, object] = {}
    for k in range(1, most + 1):
        for name in names:
            _add(
                metrics,
                f"pass@{k}/{name}",
                [pass_at(values, k) for task in scored if len(values := task.of(name)) >= k],
            )
            _add(metrics, f"pass@1[avg-of-{k}]/{name}", [_mean(v) for task in scored if (v := task.of(name, k))])
            if answer_key is not None:
                _add(metrics, f"majority@{k}/{name}", [_majority(task, name, k) for task in scored])
    metrics[PER_SAMPLE] = runs = _per_run(scored, names, most)
    for k in range(2, most + 1):
        for name in names:
            metrics |= _variation(f"pass@1[avg-of-{k}]/{name}", runs.get(name, [])[:k], scored, name, k)
    return metrics


def subset_metrics(
    tasks: Sequence[Sequence[Rollout]], subset_key: str, score: ScoreOf | None = None, answer_key: str | None = None
) -> JsonPayload:
    """Returns the same for each value of a field: `easy/pass@1/accuracy`."""
    subsets: dict[str, list[Sequence[Rollout]]] = {}
    for task in tasks:
        value = task[0].get(subset_key) if task else None
        if value:
            subsets.setdefault(str(value), []).append(task)
    return {
        f"{subset}/{name}": value
        for subset, members in subsets.items()
        for name, value in pass_metrics(members, score, answer_key).items()
        if name != PER_SAMPLE
    }


def highest_k(
    metrics: JsonPayload,
    pattern: str,
    score_names: Sequence[str] | None = None,
    exclude_names: Sequence[str] = (),
) -> JsonPayload:
    """Returns those of `pass@{k}` or `pass@1[avg-of-{k}]` with the largest k, without their statistics."""
    shape = re.compile("^" + re.escape(pattern).replace(r"\{k\}", r"(\d+)") + "/(.+)$")
    found: list[tuple[int, str]] = []
    for name in metrics:
        match = shape.match(name)
        if match is None or match[2].endswith(STATISTICS) or match[2] in exclude_names:
            continue
        if score_names is None or match[2] in score_names:
            found.append((int(match[1]), name))
    most = max((k for k, _ in found), default=0)
    return {name: metrics[name] for k, name in found if k == most}


def pass_at(values: Sequence[float], k: int) -> float:
    """Returns the probability that k of them, drawn without replacement, include a correct one; for other scores the
    best of the first k."""
    if any(value not in (0, 1) for value in values):
        return max(values[:k])
    wrong = sum(not value for value in values)
    return 1.0 if wrong < k else 1.0 - math.comb(wrong, k) / math.comb(len(values), k)


def _scored(task: Sequence[Rollout], score: ScoreOf, answer_key: str | None) -> TaskScores:
    scores = [{name: float(value) for name, value in score(one).items()} for one in task]
    if answer_key is None:
        return TaskScores(scores, [])
    answers = [one.get(answer_key) for one in task]
    for one, answer in zip(scores, answers, strict=True):
        one["no_answer"] = float(answer is None)
    return TaskScores(scores, answers)


def _majority(task: TaskScores, name: str, k: int) -> float:
    """Returns the score of the most frequent answer; if there are several, their average. No answer at all: 0."""
    given = zip(task.answers[:k], task.scores[:k], strict=True)
    votes = Counter((_hashable(answer), one[name]) for answer, one in given if answer is not None and name in one)
    if not votes:
        return 0.0
    most = max(votes.values())
    return _mean([score for (_, score), count in votes.items() if count == most])


def _per_run(scored: Sequence[TaskScores], names: Sequence[str], most: int) -> dict[str, list[float]]:
    """Returns what each run over all tasks would have got by itself."""
    runs: dict[str, list[float]] = {}
    for name in names:
        for run in range(most):
            values = [task.scores[run][name] for task in scored if run < len(task.scores) and name in task.scores[run]]
            if values:
                runs.setdefault(name, []).append(100.0 * _mean(values))
    return runs


def _variation(label: str, runs: list[float], scored: Sequence[TaskScores], name: str, k: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    if len(runs) >= 2:
        figures[f"{label}/std_dev_across_runs"] = spread = deviation(runs)
        figures[f"{label}/std_err_across_runs"] = spread / math.sqrt(len(runs))
    within = [deviation(values) for task in scored if len(values := task.of(name, k)) >= 2]
    if within:
        figures[f"{label}/avg_sample_std_dev"] = _mean(within)
    return figures


def _add(metrics: dict[str, object], name: str, values: list[float]) -> None:
    if values:
        metrics[name] = 100.0 * _mean(values)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _hashable(answer: object) -> object:
    return answer if isinstance(answer, str | int | float | bool) else repr(answer)
