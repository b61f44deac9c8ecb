"""Scores of environments: pass@k with Wilson's interval over tasks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.rollouts.score_metrics import score_metrics, wilson_interval
from palestra.rollouts.sources import blank_rollout
from palestra.types.rollouts import Group, GroupRequest, RolloutStop, Task


def group(environment: str, name: str, rewards: list[float | None]) -> Group:
    task = Task(id=name, environment=environment, prompt=[], extras={})
    request = GroupRequest(id=f"{environment}-{name}", task=task, step=0, seeds=tuple(range(len(rewards))))
    rollouts = [blank_rollout(request, index, index) for index in range(len(rewards))]
    for rollout, reward in zip(rollouts, rewards, strict=True):
        rollout.reward, rollout.stop = reward, RolloutStop.DONE if reward is not None else RolloutStop.ENV_FAILED
    return Group(id=request.id, task=task, step=0, rollouts=rollouts)


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [(0.5, 10, 0.2366, 0.7634), (0.0, 8, 0.0, 0.3244), (1.0, 8, 0.6756, 1.0), (0.9, 1319, 0.8827, 0.9151)],
)
def test_interval_is_wilsons(share, count, low, high):
    found = wilson_interval(share, count)
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


@given(st.floats(0, 1), st.integers(1, 5000))
def test_interval_holds_its_share(share, count):
    low, high = wilson_interval(share, count)
    assert 0 <= low <= share <= high <= 1


def test_scores_are_by_environment_and_leave_out_what_was_not_graded():
    groups = [
        group("gsm8k", "a", [1.0, 0.0]),
        group("gsm8k", "b", [0.0, 0.0]),
        group("gsm8k", "c", [None, 1.0]),
        group("mbpp", "a", [1.0, 1.0]),
        group("aime", "a", [None, None]),
    ]
    found = score_metrics(groups, (1, 2), success=1.0)
    assert found["eval/gsm8k/pass_at_1"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert found["eval/gsm8k/pass_at_2"] == 0.5  # c has one graded sample
    assert found["eval/gsm8k/pass_at_2_low"] < 0.5 < found["eval/gsm8k/pass_at_2_high"]
    assert (found["eval/gsm8k/tasks"], found["eval/aime/tasks"], found["eval/mbpp/pass_at_1"]) == (3, 1, 1)
    assert "eval/aime/pass_at_1" not in found
