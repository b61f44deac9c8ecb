"""Metrics: each number is one that can be checked by hand, and none of them can stop a run."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.rollouts.eval_metrics import eval_metrics, pass_at_k
from palestra.rollouts.group_metrics import environment_metrics
from palestra.training.batches.grpo_batch import DropReason, TrainingBatch, build_batch
from palestra.training.loops.step_metrics import quantile, step_metrics
from palestra.training.policy import PolicyUpdate
from palestra.types.rollouts import Group, RolloutStop, Task
from tests.training.records import group_of, make_config, make_group, make_rollout, make_turn

SECONDS = {"collect": 2.0, "score": 0.5, "update": 1.0, "sync": 0.25, "total": 4.0}


def measure(groups: list[Group], gap: float = 0.0, metrics: dict[str, float] | None = None, base=None, **sections):
    """As a step would, with a trainer that sees each token's logprob `gap` higher than the sampler did."""
    config = make_config(**sections)
    batch = build_batch(groups, config)
    updates = [
        PolicyUpdate(metrics=metrics or {}, logprobs=[[q + gap for q in row.logprobs[1:]] for row in minibatch])
        for minibatch in batch.minibatches
    ]
    return step_metrics(groups, batch, updates, config=config, version=3, seconds=SECONDS, base_logprobs=base)


def test_rewards_are_those_of_graded_rollouts():
    found = measure([make_group("a", [1.0, 0.0, None]), make_group("b", [0.5, 0.5]), make_group("c", [None])])
    assert found["reward/mean"] == 0.5
    assert found["reward/std"] == pytest.approx(math.sqrt(0.125))
    assert found["reward/best_of_group"] == 0.75
    assert (found["reward/p10"], found["reward/p90"]) == (pytest.approx(0.15), pytest.approx(0.85))
    assert (found["rollouts/total"], found["rollouts/graded"], found["rollouts/failed"]) == (6, 4, 2)
    assert found["rollouts/zero_variance_share"] == pytest.approx(2 / 3)
    assert found["stop/env_failed"] == pytest.approx(1 / 3)
    assert found["stop/done"] == pytest.approx(2 / 3)
    assert found["stop/timeout"] == 0
    assert found["batch/dropped_zero_variance"] == 2
    assert sum(value for name, value in found.items() if name.startswith("stop/")) == pytest.approx(1.0)


def test_lengths_turns_entropy_and_age():
    rollouts = [
        make_rollout("g-0", 1.0, [make_turn(2, logprob=-1.0, version=3), make_turn(4, observation=3, logprob=-0.5)]),
        make_rollout("g-1", 0.0, [make_turn(2, logprob=-2.0, version=2, cut=True)]),
    ]
    found = measure([group_of("g", rollouts)])
    assert (found["length/mean"], found["length/max"], found["turns/mean"]) == (4, 6, 1.5)
    assert found["policy/entropy_estimate"] == pytest.approx((2 * 1 + 4 * 0.5 + 2 * 2) / 8)
    assert (found["staleness/mean"], found["staleness/max"]) == (2.0, 3.0)
    assert found["rollouts/truncated_share"] == 0.5
    assert found["batch/dropped_overlong"] == 1
    assert found["batch/sampled_tokens"] == 6


def test_sampler_and_trainer_are_compared_on_sampled_tokens():
    found = measure([make_group("g", [1.0, 0.0])], gap=0.1)
    assert found["mismatch/logprob_abs_mean"] == pytest.approx(0.1)
    assert found["mismatch/logprob_abs_max"] == pytest.approx(0.1)
    assert found["kl/sampler_trainer"] == pytest.approx(-0.1)
    assert found["kl/sampler_trainer_k3"] == pytest.approx(math.exp(0.1) - 1 - 0.1)
    assert found["policy/ratio_mean"] == pytest.approx(math.exp(0.1))
    assert "policy/clip_fraction" not in found


@pytest.mark.parametrize(
    ("algorithm", "gap", "clipped"),
    [
        ({"loss": "ppo"}, math.log(1.1), 0.0),
        ({"loss": "ppo"}, math.log(1.3), 1.0),
        ({"loss": "ppo", "loss_config": {"clip_high_threshold": 1.4}}, math.log(1.3), 0.0),
        ({"loss": "ppo", "loss_config": {"clip_low_threshold": 0.95}}, math.log(0.9), 1.0),
        ({"loss": "cispo"}, math.log(3.9), 0.0),
        ({"loss": "cispo"}, math.log(4.1), 1.0),
        ({"loss": "gspo"}, math.log(1.3), 1.0),
    ],
)
def test_the_clip_fraction_uses_the_losses_own_bounds(algorithm, gap, clipped):
    assert measure([make_group("g", [1.0, 0.0])], gap, algorithm=algorithm)["policy/clip_fraction"] == clipped


@pytest.mark.parametrize("gap", [1e4, -1e4, math.nan, math.inf, -math.inf])
def test_a_trainer_gone_mad_is_reported_and_not_raised(gap):
    found = measure([make_group("g", [1.0, 0.0])], gap)
    assert found["mismatch/not_finite"] == (0 if math.isfinite(gap) else 6)
    assert all(map(math.isfinite, found.values()))


def test_the_base_model_is_compared_where_it_was_asked():
    base = {"g-0": [0.0, 0.0, -1.5, -1.5, -1.5]}
    assert measure([make_group("g", [1.0, 0.0])], base=base)["kl/base"] == pytest.approx(1.0)
    assert "kl/base" not in measure([make_group("g", [1.0, 0.0])], base={})


def test_what_the_engine_said_is_passed_on():
    metrics = {"loss:sum": 0.5, "grad_norm": 2.0}
    found = measure([make_group("g", [1.0, 0.0])], metrics=metrics, algorithm={"minibatches": 2})
    assert (found["loss/sum"], found["optim/grad_norm"]) == (1.0, 2.0)


def test_environments_report_under_their_names():
    rollouts = [
        make_rollout("g-0", 1.0, environment="a/b", metrics={"tools used": 2.0, "bad": math.nan}),
        make_rollout("g-1", 0.0, environment="a/b", metrics={"tools used": 4.0}),
        make_rollout("g-2", None, environment="c", stop=RolloutStop.TIMEOUT),
    ]
    found = measure([group_of("g", rollouts)])
    assert (found["env/a_b/reward"], found["env/a_b/tools_used"], found["env/a_b/rollouts"]) == (0.5, 3.0, 2.0)
    assert found["env/c/rollouts"] == 1
    assert "env/c/reward" not in found
    assert "env/a_b/bad" not in found


def of_level(level: str, group: Group) -> Group:
    group.task = Task(id="t", environment="a/b", prompt=[], extras={"level": level})
    return group


def test_levels_that_tasks_name_are_reported_apart():
    groups = [
        of_level("0a", make_group("a", [1.0, 1.0])),
        of_level("Level 5", make_group("b", [0.5, 0.0, None])),
        of_level("2", make_group("c", [None])),
        make_group("d", [0.0, 0.0]),
    ]
    found, held_out = measure(groups), eval_metrics(groups, [1], 1.0)
    assert {name: value for name, value in found.items() if name.startswith("env/a_b/")} == {
        "env/a_b/0a/reward": 1.0,
        "env/a_b/Level_5/reward": 0.25,
    }
    assert (held_out["eval/a_b/0a/success"], held_out["eval/a_b/Level_5/success"]) == (1.0, 0.0)
    assert "eval/a_b/2/success" not in held_out


def test_what_tasks_are_from_is_reported_apart_and_told_to_the_environments_rule():
    def by_source(name: str, reported: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        return {f"{one['data_source']}/turns": one["turns"] for one in reported}

    groups = [make_group("x", [1], metrics={"turns": 2}), make_group("y z", [0], metrics={"turns": 5})]
    for group in groups:
        group.task = Task(id="t", environment="math", prompt=[], extras={"data_source": group.id})
    found, held_out = measure(groups), eval_metrics(groups, [1], 1.0, by_source)
    found |= environment_metrics(groups, by_source)
    assert (found["env/math/x/reward"], found["env/math/y_z/reward"]) == (1.0, 0.0)
    assert (found["env/math/x/turns"], found["env/math/y_z/turns"]) == (2.0, 5.0)
    assert (held_out["eval/math/x/success"], held_out["eval/math/x/turns"]) == (1.0, 2.0)


def test_time_and_throughput():
    found = measure([make_group("g", [1.0, 0.0])])
    assert (found["time/collect_s"], found["time/total_s"], found["time/idle_share"]) == (2.0, 4.0, 0.5)
    assert found["throughput/collect_tokens_per_s"] == 3.0  # 6 sampled in 2 s
    assert found["throughput/update_tokens_per_s"] == 10.0  # 2 x 5 in 1 s


@pytest.mark.parametrize("groups", [[], [make_group("g", [])], [make_group("g", [None, None])]])
def test_a_step_in_which_nothing_worked_has_metrics_too(groups):
    found = measure(groups)
    assert found["batch/sequences"] == 0
    assert all(map(math.isfinite, found.values()))


def test_rollouts_without_turns_or_tokens_do_no_harm():
    rollouts = [make_rollout("g-0", 1.0, []), make_rollout("g-1", 0.0, [make_turn(0)])]
    assert measure([group_of("g", rollouts)])["length/mean"] == 0
    assert step_metrics([], TrainingBatch(minibatches=[]), [], config=make_config(), version=0, seconds={})


def test_failures_of_a_gyms_servers_are_counted_by_their_class():
    group = make_group("g", [1.0, None, None, None])
    for rollout, failure in zip(group.rollouts[1:], ["model_timeout", "model_timeout", "mine/own"], strict=True):
        rollout.failure = failure
    found = measure([group])
    shares = {name: value for name, value in found.items() if name.startswith("failure/")}
    assert shares == {"failure/model_timeout": 0.5, "failure/mine_own": 0.25}


def test_every_metric_is_explained_in_the_docs():
    text = Path(__file__).parents[3].joinpath("docs/metrics.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"`([\w/<>@.-]+)`", text))
    base = {"g-0": [0.0] * 5, "g-1": [0.0] * 5}
    group = of_level("0a", make_group("g", [1.0, 0.0], metrics={"parse_error": 1.0}))
    group.rollouts[1].failure = "model_error"
    found = measure([group], metrics={"loss:sum": 1.0, "grad_norm": 1.0}, base=base, algorithm={"loss": "ppo"})
    found |= eval_metrics([of_level("0a", make_group("g", [1.0, 0.0]))], [1, 2], 1.0)
    for name in found:
        general = re.sub(r"^(env|eval)/(math|a_b)/", r"\1/<name>/", name)
        general = re.sub(r"/0a/", "/<label>/", general)
        general = re.sub(r"^env/<name>/parse_error$", "env/<name>/<metric>", general)
        general = re.sub(r"^(stop/|batch/dropped_)\w+$", r"\1<reason>", general)
        general = re.sub(r"^failure/\w+$", "failure/<class>", general)
        general = re.sub(r"pass_at_\d+$", "pass_at_<k>", general)
        assert general in explained, name
    for reason in [*RolloutStop, *DropReason]:
        assert f"`{reason}`" in text, reason


@given(st.integers(0, 7), st.integers(1, 7), st.integers(1, 7))
def test_pass_at_k_is_the_share_of_draws_with_a_success(successes, samples, k):
    if successes > samples or k > samples:
        with pytest.raises(ValueError, match="k must be from 1 to the samples"):
            pass_at_k(successes, samples, k)
        return
    outcomes = [index < successes for index in range(samples)]
    draws = list(itertools.combinations(outcomes, k))
    assert pass_at_k(successes, samples, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_evaluations_count_tasks_and_leave_out_what_failed():
    groups = [make_group("a", [1.0, 0.0]), make_group("b", [1.0, None]), make_group("c", [None, None])]
    found = eval_metrics(groups, [1, 2, 4], success=1.0)
    assert found["eval/success"] == 0.75
    assert found["eval/success_stderr"] == pytest.approx(0.25)
    assert found["eval/pass_at_1"] == 0.75
    assert found["eval/pass_at_2"] == 1.0
    assert "eval/pass_at_4" not in found
    assert found["eval/failed_share"] == 0.5
    assert found["eval/math/success"] == pytest.approx(2 / 3)
    assert eval_metrics([], [1], 1.0, prefix="test") == {"test/tasks": 0.0, "test/rollouts": 0.0}


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=30), st.floats(0, 1))
def test_quantiles_lie_between_the_ends(values, share):
    ordered = sorted(values)
    assert ordered[0] - 1e-9 <= quantile(ordered, share) <= ordered[-1] + 1e-9


def test_the_share_of_tokens_with_replayed_experts():
    groups = [make_group("a", [1.0, 0.0])]
    assert "policy/routing_replayed" not in measure(groups)
    found = measure(groups, metrics={"routing_replayed:sum": 6.0}, algorithm={"replay_routing": True})
    assert found["policy/routing_replayed"] == 6.0 / (2 * 4)
