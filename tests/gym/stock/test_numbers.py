"""The stand-in's own metrics are those of the gym."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.gym.metrics import aggregate, highest_k, pass_metrics, subset_metrics
from palestra.gym.nemo_gym_compat import COMPAT
from tests.properties import examples

SCORES = st.sampled_from([0, 1, 0.0, 1.0, 0.25])
ROLLOUT = st.fixed_dictionaries(
    {"reward": SCORES, "answer": st.sampled_from([None, "a", "b"]), "level": st.sampled_from(["easy", "hard", None])},
    optional={"is_short": st.booleans(), "response": st.just({"usage": {"output_tokens": 3}})},
)
TASKS = st.lists(st.lists(ROLLOUT, min_size=1, max_size=4), max_size=4)


@pytest.fixture(scope="module", autouse=True)
def stand_in() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(COMPAT))
        yield


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return math.isclose(one, other, abs_tol=1e-9) if isinstance(one, float) else one == other


@examples(40)
@given(TASKS)
def test_pass_rates(tasks: list[list[dict[str, Any]]]) -> None:
    from nemo_gym.reward_profile import (
        add_avg_sample_std_dev,
        compute_pass_majority_metrics,
        compute_subset_metrics,
        highest_k_metrics,
    )

    metrics, scores, names, most = compute_pass_majority_metrics(tasks, answer_key="answer")
    assert most == max(map(len, tasks), default=0)
    add_avg_sample_std_dev(metrics, scores, names, most)
    ours = pass_metrics(tasks, answer_key="answer")
    assert alike(metrics, ours)
    for pattern in ("pass@{k}", "pass@1[avg-of-{k}]", "majority@{k}"):
        assert (
            highest_k_metrics(metrics, pattern, exclude_names=["no_answer"]).keys()
            == highest_k(ours, pattern, exclude_names=["no_answer"]).keys()
        )
    of_subsets = compute_subset_metrics(tasks, "level")
    plain = {name: value for name, value in subset_metrics(tasks, "level").items() if "avg_sample" not in name}
    assert alike(of_subsets, plain)


@examples(40)
@given(TASKS)
def test_aggregates(tasks: list[list[dict[str, Any]]]) -> None:
    from nemo_gym.reward_profile import compute_aggregate_metrics

    rows = [
        {**one, "_ng_task_index": task, "_ng_rollout_index": at}
        for task, rollouts in enumerate(tasks)
        for at, one in enumerate(rollouts)
    ]

    def own(grouped: list[list[Any]]) -> dict[str, Any]:
        per_task = [{"_ng_task_index": at, "size": len(one)} for at, one in enumerate(grouped)]
        return {"tasks": len(grouped), "per_task_metrics": per_task}

    assert alike(compute_aggregate_metrics(rows, own).model_dump(), aggregate(rows, own))
