"""pass@k, the average of k, majority@k and how much they vary, in percent."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from nemo_gym.json_types import JsonObject

Rollouts = list[JsonObject]
Scores = list[dict[str, float]]
PER_SAMPLE = "per_sample_aggregate"
_STATISTICS = ("std_dev_across_runs", "std_err_across_runs", "avg_sample_std_dev")


def compute_pass_majority_metrics(
    tasks: list[Rollouts],
    score_fn: Callable[[JsonObject], JsonObject] | None = None,
    answer_key: str | None = None,
) -> tuple[JsonObject, list[Scores], list[str], int]:
    """Metrics, the scores of every rollout, their names, and the largest k."""
    if not tasks:
        return {}, [], [], 0
    scores = [[_scores(one, score_fn, answer_key) for one in rollouts] for rollouts in tasks]
    names = sorted({name for task in scores for one in task for name in one})
    most = max(map(len, tasks))
    metrics: JsonObject = {}
    for k in range(1, most + 1):
        for name in names:
            columns = [_column(task, name) for task in scores]
            _add(metrics, f"pass@{k}/{name}", [_pass_at(values, k) for values in columns if len(values) >= k])
            firsts = [_column(task[:k], name) for task in scores]
            _add(metrics, f"pass@1[avg-of-{k}]/{name}", [_mean(values) for values in firsts if values])
            if answer_key is not None:
                votes = [_majority(r, s, answer_key, name, k) for r, s in zip(tasks, scores, strict=True)]
                _add(metrics, f"majority@{k}/{name}", votes)
    metrics[PER_SAMPLE] = runs = _runs(scores, names, most)
    for k in range(2, most + 1):
        for name in names:
            metrics |= _variation(f"pass@1[avg-of-{k}]/{name}", runs.get(name, [])[:k])
    return metrics, scores, names, most


def add_avg_sample_std_dev(
    metrics: JsonObject, all_score_dicts: list[Scores], score_names: Sequence[str], max_k: int
) -> None:
    """How much the rollouts of a task differ, on average: into `metrics`."""
    for k in range(2, max_k + 1):
        for name in score_names:
            columns = [_column(task[:k], name) for task in all_score_dicts]
            within = [_deviation(values) for values in columns if len(values) > 1]
            if within:
                metrics[f"pass@1[avg-of-{k}]/{name}/avg_sample_std_dev"] = _mean(within)


def compute_subset_metrics(
    tasks: list[Rollouts],
    subset_key: str,
    score_fn: Callable[[JsonObject], JsonObject] | None = None,
    answer_key: str | None = None,
) -> JsonObject:
    """The same for each value of a field: `easy/pass@1/accuracy`."""
    subsets: dict[Any, list[Rollouts]] = {}
    for rollouts in tasks:
        if rollouts and rollouts[0].get(subset_key):
            subsets.setdefault(rollouts[0][subset_key], []).append(rollouts)
    found = {value: compute_pass_majority_metrics(ones, score_fn, answer_key)[0] for value, ones in subsets.items()}
    return {
        f"{value}/{name}": metric
        for value, metrics in found.items()
        for name, metric in metrics.items()
        if name != PER_SAMPLE
    }


def highest_k_metrics(
    agent_metrics: JsonObject,
    pattern: str,
    score_names: Sequence[str] | None = None,
    exclude_names: Sequence[str] | None = None,
) -> JsonObject:
    """Those of a pattern such as `pass@{k}` with the largest k there is, without their statistics."""
    shape = re.compile(re.escape(pattern).replace(r"\{k\}", r"(\d+)") + "/(.+)")
    found: dict[str, int] = {}
    for key in agent_metrics:
        match = shape.fullmatch(key)
        if match is None or match[2].endswith(_STATISTICS) or match[2] in (exclude_names or ()):
            continue
        if score_names is None or match[2] in score_names:
            found[key] = int(match[1])
    return {key: agent_metrics[key] for key, k in found.items() if k == max(found.values())}


def _scores(rollout: JsonObject, score_fn: Any, answer_key: str | None) -> dict[str, float]:
    given: JsonObject = {"accuracy": rollout["reward"]} if score_fn is None else score_fn(rollout)
    scores: dict[str, float] = {name: int(value) if isinstance(value, bool) else value for name, value in given.items()}
    return scores if answer_key is None else {**scores, "no_answer": int(rollout.get(answer_key) is None)}


def _column(task: Scores, name: str) -> list[float]:
    return [one[name] for one in task if name in one]


def _pass_at(values: list[float], k: int) -> float:
    if any(value not in (0, 1) for value in values):
        return max(values[:k])
    wrong = sum(not value for value in values)
    return 1.0 - math.comb(wrong, k) / math.comb(len(values), k)


def _majority(rollouts: Rollouts, scores: Scores, answer_key: str, name: str, k: int) -> float:
    pairs = zip(rollouts[:k], scores[:k], strict=True)
    votes = Counter(
        (_hashable(rollout[answer_key]), one[name])
        for rollout, one in pairs
        if rollout.get(answer_key) is not None and name in one
    )
    if not votes:
        return 0.0
    return _mean([score for (_, score), count in votes.items() if count == max(votes.values())])


def _hashable(answer: object) -> object:
    return answer if isinstance(answer, str | int | float) else repr(answer)


def _runs(scores: list[Scores], names: list[str], most: int) -> dict[str, list[float]]:
    """What each run over all tasks got alone."""
    runs = {
        name: [
            100.0 * _mean(values)
            for run in range(most)
            if (values := [task[run][name] for task in scores if run < len(task) and name in task[run]])
        ]
        for name in names
    }
    return {name: values for name, values in runs.items() if values}


def _variation(label: str, runs: list[float]) -> dict[str, float]:
    if len(runs) < 2:
        return {}
    spread = _deviation(runs)
    return {f"{label}/std_dev_across_runs": spread, f"{label}/std_err_across_runs": spread / math.sqrt(len(runs))}


def _add(metrics: JsonObject, name: str, values: list[float]) -> None:
    if values:
        metrics[name] = 100.0 * _mean(values)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _deviation(values: list[float]) -> float:
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
