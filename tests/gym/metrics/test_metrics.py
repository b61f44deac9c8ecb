"""The figures of a collection, checked against slow and obvious ways to get them."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.gym.metrics import aggregate, highest_k, pass_metrics, subset_metrics

REWARDS = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=6)


def rollouts(rewards: list[float], task: int = 0, **more: object) -> list[dict]:
    return [{"_ng_task_index": task, "_ng_rollout_index": at, "reward": one, **more} for at, one in enumerate(rewards)]


@given(st.lists(REWARDS, min_size=1, max_size=4), st.integers(1, 6))
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_one(tasks: list[list[float]], k: int) -> None:
    metrics = pass_metrics([rollouts(rewards, at) for at, rewards in enumerate(tasks)])
    shares = [
        statistics.fmean(max(draw) for draw in itertools.combinations(rewards, k))
        for rewards in tasks
        if len(rewards) >= k
    ]
    if shares:
        assert metrics[f"pass@{k}/accuracy"] == pytest.approx(100 * statistics.fmean(shares))
    else:
        assert f"pass@{k}/accuracy" not in metrics


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=9))
def test_five_figures_of_a_column(rewards: list[float]) -> None:
    metrics = aggregate(rollouts(rewards))["agent_metrics"]
    assert metrics["mean/reward"] == pytest.approx(statistics.fmean(rewards))
    assert metrics["median/reward"] == pytest.approx(statistics.median(rewards))
    assert metrics["std/reward"] == pytest.approx(statistics.stdev(rewards) if len(rewards) > 1 else 0.0, abs=1e-12)
    assert (metrics["min/reward"], metrics["max/reward"]) == (min(rewards), max(rewards))


def test_numbers_truth_values_and_usage_count_and_the_rest_does_not() -> None:
    row = {"reward": 1.0, "is_right": True, "note": "x", "nothing": None, "bad": float("nan")}
    answered = [{**row, "_ng_task_index": 3, "response": {"usage": {"output_tokens": 7, "details": {"a": 1}}}}]
    found = aggregate(answered)
    assert found["key_metrics"] == {"mean/reward": 1.0, "mean/is_right": 1.0, "mean/output_tokens": 7.0}
    assert found["group_level_metrics"][0]["_ng_task_index"] == 3
    assert found["group_level_metrics"][0]["rollout_infos"][0]["output_tokens"] == 7


def test_the_majority_votes_and_ties_are_averaged() -> None:
    task = [
        {"reward": 1.0, "answer": "a"},
        {"reward": 0.0, "answer": "b"},
        {"reward": 0.0, "answer": "b"},
        {"reward": 0.0, "answer": None},
    ]
    metrics = pass_metrics([task], answer_key="answer")
    assert metrics["majority@1/accuracy"] == 100.0
    assert metrics["majority@2/accuracy"] == 50.0
    assert metrics["majority@3/accuracy"] == 0.0
    assert metrics["pass@1/no_answer"] == 25.0


def test_graded_scores_take_the_best_of_the_first_k() -> None:
    metrics = pass_metrics([rollouts([0.25, 0.75, 0.5])])
    assert [metrics[f"pass@{k}/accuracy"] for k in (1, 2, 3)] == [25.0, 75.0, 75.0]
    assert metrics["pass@1[avg-of-2]/accuracy"] == 50.0


def test_runs_vary_across_and_within_tasks() -> None:
    metrics = pass_metrics([rollouts([1.0, 0.0]), rollouts([1.0, 1.0], 1)])
    assert metrics["per_sample_aggregate"] == {"accuracy": [100.0, 50.0]}
    assert metrics["pass@1[avg-of-2]/accuracy/std_dev_across_runs"] == pytest.approx(statistics.stdev([100, 50]))
    assert metrics["pass@1[avg-of-2]/accuracy/std_err_across_runs"] == pytest.approx(25.0)
    assert metrics["pass@1[avg-of-2]/accuracy/avg_sample_std_dev"] == pytest.approx(statistics.stdev([1, 0]) / 2)


def test_the_largest_k_and_subsets() -> None:
    tasks = [rollouts([1.0, 0.0], 0, level="easy"), rollouts([0.0, 0.0], 1, level="hard")]
    metrics = pass_metrics(tasks) | subset_metrics(tasks, "level")
    assert highest_k(metrics, "pass@{k}") == {"pass@2/accuracy": 50.0}
    assert highest_k(metrics, "pass@1[avg-of-{k}]", ["accuracy"]) == {"pass@1[avg-of-2]/accuracy": 25.0}
    assert metrics["easy/pass@2/accuracy"] == 100.0
    assert metrics["hard/pass@2/accuracy"] == 0.0


def test_a_servers_own_metrics_stand_beside_the_common_ones() -> None:
    def compute(tasks: list) -> dict:
        return {"tasks": len(tasks), "per_task_metrics": [{"_ng_task_index": 1, "is_hard": True}]}

    found = aggregate(rollouts([1.0]) + rollouts([0.0], 1), compute, lambda metrics: {"only": metrics["tasks"]})
    assert found["key_metrics"] == {"only": 2}
    assert [group.get("is_hard") for group in found["group_level_metrics"]] == [None, True]


def test_nothing_has_no_metrics() -> None:
    assert aggregate([]) == {"group_level_metrics": [], "agent_metrics": {}, "key_metrics": {}}
