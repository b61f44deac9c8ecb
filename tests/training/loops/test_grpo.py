"""Runs that train for real: the bundled model, a real server, the official SDK."""

from __future__ import annotations

import math

import pytest

from palestra.runs.listener import Silence, Stage
from palestra.runs.reader import Part, RunStatus
from tests.training.trainers import FEW, TOOLS

LEARNING = {"rollout": {"group_size": 8, "groups_per_step": 8}, "eval": {"every": 8, "tasks": 96}, "steps": 8}
QUICKLY = {
    "rollout": {"group_size": 8, "groups_per_step": 6, "max_tokens": 24},
    "optimizer": {"lr": 4e-3},
    "eval": {"every": 6, "tasks": 96},
    "steps": 6,
}
HEALTH = [
    *("reward/mean", "reward/p10", "reward/p90", "kl/sampler_trainer", "kl/base", "mismatch/logprob_abs_max"),
    *("policy/entropy_estimate", "policy/clip_fraction", "optim/grad_norm", "staleness/max"),
    *("rollouts/truncated_share", "rollouts/zero_variance_share", "rollouts/failed"),
    *("time/collect_s", "time/score_s", "time/update_s", "time/sync_s"),
    *("throughput/collect_tokens_per_s", "throughput/update_tokens_per_s"),
]
CHANCE = 2 * math.sqrt(0.25 / 96)  # two standard errors of an evaluation


@pytest.mark.parametrize(
    ("environment", "asynchronous", "settings"),
    [
        pytest.param("arithmetic", False, QUICKLY, id="arithmetic-sync"),
        pytest.param("arithmetic", True, LEARNING, id="arithmetic-async", marks=pytest.mark.slow),
        pytest.param("stockroom", False, LEARNING, id="stockroom-sync", marks=pytest.mark.slow),
        pytest.param("stockroom", True, LEARNING, id="stockroom-async", marks=pytest.mark.slow),
    ],
)
def test_reward_rises(run_training, environment, asynchronous, settings):
    run = run_training(
        "learns", environments=[{"name": environment}], asynchronous={"enabled": asynchronous}, **settings
    )
    evals = [row["eval/success"] for row in run.read_metrics() if "eval/success" in row]
    assert len(evals) == 2
    assert evals[1] > evals[0] + CHANCE
    assert run.status() is RunStatus.DONE


class Stages(Silence):
    """Remembers the stages, in the order in which they begin."""

    def __init__(self) -> None:
        self.begun: list[Stage] = []

    def stage(self, stage: Stage, done: int, total: int) -> None:
        if self.begun[-1:] != [stage]:
            self.begun.append(stage)


def test_every_stage_of_a_run_is_reported_when_it_begins(run_training):
    listener = Stages()
    run_training("staged", listener, steps=1, rollout=FEW, eval={"every": 1, "tasks": 2})
    in_a_step = ["collect", "score", "update", "guard", "update", "guard", "sync", "save"]
    assert listener.begun == ["start", "sync", "eval", "save", *in_a_step, "eval", "end"]


def test_a_step_reports_its_health(run_training):
    run = run_training("healthy", steps=2, rollout=FEW, algorithm={"loss": "ppo"})
    first, second = run.read_metrics()
    for name in HEALTH:
        assert math.isfinite(second[name]), name
    # float32, temperature 1, on policy: what was sampled is what is trained.
    assert first["mismatch/logprob_abs_max"] < 1e-4
    assert second["mismatch/logprob_abs_max"] < 1e-4
    assert first["kl/base"] == pytest.approx(0, abs=1e-4)
    assert abs(second["kl/base"]) > 1e-4


def test_trained_tokens_are_the_sampled_ones(run_training):
    """The run's token files hold whole conversations by the template; only sampled tokens have advantages."""
    from palestra.chat import ChatTokenizer
    from palestra.config.bundled import BUNDLED, EPHEBE

    run = run_training("tokens", steps=1, rollout=FEW, **TOOLS)
    tokenizer = ChatTokenizer.load(BUNDLED / EPHEBE)
    records = {record["id"]: record for record in run.read_rollouts(1)}
    used = [record for record in run.read_tokens(1) if record["advantages"]]
    assert used
    for record in used:
        tokens, sampled = list(record["prompt"]), [False] * len(record["prompt"])
        for turn in record["turns"]:
            tokens += turn["observation"] + turn["tokens"]
            sampled += [False] * len(turn["observation"]) + [True] * len(turn["tokens"])
        assert [bool(advantage) for advantage in record["advantages"]] == sampled
        messages = records[record["id"]]["messages"]
        whole = tokenizer.encode_chat(messages, add_generation_prompt=False)
        assert tokens == whole[: len(tokens)]


def test_environments_are_mixed_by_weight(run_training):
    entries = [{"name": "stockroom", "weight": 3}, {"name": "arithmetic", "weight": 1}]
    few = {"group_size": 2}
    run = run_training("mixed", environments=entries, steps=1, rollout=few, data={"zero_variance": "keep"})
    (row,) = run.read_metrics()
    assert (row["env/stockroom/rollouts"], row["env/arithmetic/rollouts"]) == (6, 2)


@pytest.mark.slow
def test_both_styles_of_playing_give_the_same_curve(run_training):
    one, other = (run_training(style, steps=2, rollout={"style": style}, **TOOLS) for style in ("async", "batched"))
    assert rewards(one) == rewards(other)


def test_groups_that_teach_nothing_are_played_again_or_dropped(run_training):
    entry = {"name": "stockroom", "extras": {"max_turns": 1}}  # one turn: nobody can know
    data = {"zero_variance": "refill", "max_refills": 2}
    run = run_training("barren", environments=[entry], steps=1, rollout=FEW, data=data)
    (row,) = run.read_metrics()
    assert row["rollouts/total"] == 3 * 8
    assert row["batch/sequences"] == 0
    assert row["batch/dropped_zero_variance"] == 3 * 8


@pytest.mark.slow
def test_shuffled_rewards_change_the_advantages_and_nothing_else(run_training):
    plain, shuffled = (
        run_training(f"shuffled-{on}", steps=1, algorithm={"shuffle_rewards": on}) for on in (False, True)
    )
    assert rewards(plain) == rewards(shuffled)
    assert [record["advantages"] for record in plain.read_tokens(1)] != [
        record["advantages"] for record in shuffled.read_tokens(1)
    ]


@pytest.mark.slow
def test_a_mixture_of_experts_is_trained_with_the_experts_of_its_samples(run_training, random_model):
    options = {
        "algorithm": {"replay_routing": True},
        "data": {"zero_variance": "keep"},
        "rollout": {"endings": {"length": "grade"}},
    }
    run = run_training("moe", server=None, model={"name": str(random_model("qwen3_moe"))}, steps=1, **options)
    (row,) = run.read_metrics()
    assert row["policy/routing_replayed"] == 1.0
    assert row["mismatch/logprob_abs_max"] < 1e-3


def test_a_run_stops_when_it_is_good_enough(run_training):
    run = run_training("early", steps=5, eval={"every": 1, "tasks": 8}, early_stop={"at_least": 0.0})
    assert run.status() is RunStatus.STOPPED
    assert run.steps(Part.EVAL) == [0]


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 0.7])
def test_the_kl_penalty_is_nothing_while_policy_and_base_are_one(run_training, temperature):
    """In the first step: all tokens of a rollout have the same advantage still, at whatever temperature."""
    settings = {
        "penalty": {"kl": 1.0},
        "algorithm": {"normalize": "none"},
        "rollout": {**FEW, "temperature": temperature},
    }
    run = run_training("kl", steps=1, data={"zero_variance": "keep"}, **settings)
    used = [[one for one in record["advantages"] if one] for record in run.read_tokens(1) if record["advantages"]]
    assert len(used) == 8
    assert all(max(found) - min(found) < 1e-3 for found in used if found)


@pytest.mark.slow
def test_async_groups_are_no_older_than_allowed(run_training):
    run = run_training(
        "stale", steps=5, **TOOLS, asynchronous={"enabled": True, "max_staleness": 1, "in_flight": "drop"}
    )
    ages = [row["staleness/max"] for row in run.read_metrics()]
    assert max(ages) <= 1
    assert ages[-1] == 1  # it did play ahead


def rewards(run) -> list[float]:
    return [row["reward/mean"] for row in run.read_metrics()]


@pytest.mark.slow
def test_at_another_temperature_the_ratio_still_starts_at_one(run_training):
    """The sampler's logprobs are at its temperature: taken as they are, every ratio would be off."""
    run = run_training("hot", steps=1, rollout={"temperature": 1.3})
    (row,) = run.read_metrics()
    assert row["policy/ratio_min"] == pytest.approx(1, abs=1e-4)
    assert row["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
    used = next(record for record in run.read_tokens(1) if record["advantages"])
    assert sum(map(sum, (turn["logprobs"] for turn in used["turns"]))) < 0  # the record keeps what was drawn with
