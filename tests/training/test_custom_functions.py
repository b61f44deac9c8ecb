"""Advantages and losses of users: they work like built-in ones, and mistakes are told before anything starts."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from palestra.config.algorithm import AlgorithmConfig
from palestra.training.batches.grpo_batch import build_batch
from palestra.training.custom_functions import FunctionError, check_functions, custom_loss
from palestra.types import AdamParams
from palestra.types.rollouts import TrainSequence
from tests.training.records import make_config, make_group
from tests.training.trainers import FEW, train

NUMBERS = itertools.count()
EXAMPLES = Path(__file__).parents[2] / "examples"
FUNCTIONS = """
import torch
from statistics import fmean, stdev

NUMBER = 7

def centred(rewards, rollouts):
    return [reward - fmean(rewards) for reward in rewards]

def by_length(rewards, rollouts):
    return [reward / rollout.response_length for reward, rollout in zip(rewards, rollouts, strict=True)]

def too_few(rewards, rollouts):
    return rewards[1:]

def nothing(rewards, rollouts):
    return None

def infinite(rewards, rollouts):
    return [float("inf")] * len(rewards)

def raises(rewards, rollouts):
    return [reward / stdev(rewards) for reward in rewards]

def one_argument(rewards):
    return rewards

async def later(rewards, rollouts):
    return rewards

def importance_sampling(logprobs, sequences, scale=1.0):
    pairs = list(zip(logprobs, sequences, strict=True))
    ratios = [torch.where(one.mask, own - one.old_logprobs, 0.0).exp() for own, one in pairs]
    loss = -sum((ratio * one.advantages).sum() for ratio, one in zip(ratios, sequences, strict=True))
    return scale * loss, {"ratio": torch.cat(ratios).mean(), "sequences": len(sequences)}

def first_only(logprobs, sequences):
    return -(logprobs[0] * sequences[0].advantages).sum(), {}

def not_scalar(logprobs, sequences):
    return logprobs[0], {}

def no_metrics(logprobs, sequences):
    return logprobs[0].sum()

def detached(logprobs, sequences):
    return logprobs[0].sum().detach(), {}

def not_finite(logprobs, sequences):
    return (logprobs[0] - logprobs[0].detach()).sqrt().sum(), {}

def bad_metrics(logprobs, sequences):
    return logprobs[0].sum(), {"loss": "high"}

def breaks(logprobs, sequences):
    raise RuntimeError("no luck")

CALLS = 0

def breaks_later(logprobs, sequences):
    global CALLS
    CALLS += 1
    return logprobs[0].sum() * (float("nan") if CALLS > 2 else 1.0), {}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.fixture
def mine(folder: Path) -> Callable[[str], str]:
    """`mine("name")`: the name of a function above, as configs have it. Its module has a new name in each test, since
    Python imports a name once."""
    module = f"mine_{next(NUMBERS)}"
    (folder / f"{module}.py").write_text(FUNCTIONS)
    return lambda name: f"{module}:{name}"


def test_an_advantage_of_ones_own_is_used_like_a_built_in_one(mine):
    groups = [make_group("g", [1.0, 0.0, 0.0, None]), make_group("h", [0.5, 1.0])]
    own, built_in = (
        build_batch(groups, make_config(algorithm={"advantage": name})) for name in (mine("centred"), "mean_baseline")
    )
    assert own.sequences == built_in.sequences


def test_an_advantage_sees_the_rollouts_of_its_rewards(mine):
    algorithm = {"advantage": mine("by_length"), "normalize": "none"}
    (group,) = [make_group("g", [1.0, None, 0.5])]
    batch = build_batch([group], make_config(algorithm=algorithm))
    assert {row.rollout: row.advantages[-1] for row in batch.sequences} == {
        "g-0": pytest.approx(1 / 3),
        "g-2": pytest.approx(0.5 / 3),
    }


@pytest.mark.parametrize(
    ("setting", "name", "message"),
    [
        ("advantage", "centerd", "no function 'centerd' in .*\n  did you mean: centred\\?"),
        ("advantage", "NUMBER", "no function 'NUMBER' in "),
        ("advantage", "too_few", "returned 3 advantages for 4 rewards; return one for each"),
        ("advantage", "nothing", "must return a number for each reward, not None"),
        ("advantage", "infinite", "every advantage must be a finite number"),
        ("advantage", "raises", r"for the rewards \[1.0, 1.0\], raised ZeroDivisionError: .*mine_\d+.py:\d+"),
        ("advantage", "one_argument", r"takes \(rewards\), but is called with \(rewards, rollouts\)"),
        ("advantage", "later", "is async; write it as a plain function"),
        ("loss", "not_scalar", r"must return a scalar tensor as its loss, not a tensor of shape \(6,\)"),
        ("loss", "no_metrics", "must return the loss and a mapping of metrics"),
        ("loss", "detached", "does not depend on the logprobs"),
        ("loss", "not_finite", "it and its gradient must be finite"),
        ("loss", "bad_metrics", "must return numbers as metrics, not {'loss': 'high'}"),
        ("loss", "breaks", r"raised RuntimeError: no luck \(.*mine_\d+.py:\d+\)"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_by_a_dry_run(mine, setting, name, message):
    with pytest.raises(FunctionError, match=message) as caught:
        check_functions(AlgorithmConfig.model_validate({setting: mine(name)}))
    assert f"algorithm.{setting} {mine(name)!r}" in str(caught.value)


@pytest.mark.parametrize("setting", ["advantage", "loss"])
def test_a_module_that_does_not_exist_is_named_before_anything_starts(setting):
    code, said = train("arithmetic", f"algorithm.{setting}=no_such_module:function")
    assert code == 2
    assert f"algorithm.{setting} 'no_such_module:function': no module 'no_such_module' here" in said
    assert not Path("runs").exists()


@pytest.mark.parametrize("setting", ["advantage", "loss"])
def test_a_name_without_a_module_is_refused_with_what_there_is(setting):
    code, said = train("arithmetic", f"algorithm.{setting}=gpro")
    assert code == 2
    assert "should be 'importance_sampling'" in said or "should be 'grpo'" in said
    assert "or a function of your own, as package.module:function" in said


def test_settings_of_a_loss_are_its_keyword_arguments(mine):
    sequence = sequences()[0]
    losses = []
    for settings in ({}, {"scale": 2.0}):
        config = AlgorithmConfig(loss=mine("importance_sampling"), loss_config=settings)
        check_functions(config)
        loss = custom_loss(config)
        assert loss is not None
        losses.append(loss.differentiate([sequence], [sequence.logprobs[1:]]))
    assert losses[1].loss == pytest.approx(2 * losses[0].loss)
    assert losses[1].gradients[0] == pytest.approx([2 * one for one in losses[0].gradients[0]])
    with pytest.raises(FunctionError, match="unexpected keyword argument 'skale'"):
        check_functions(AlgorithmConfig(loss=mine("importance_sampling"), loss_config={"skale": 2.0}))


def test_a_loss_may_leave_sequences_out(mine):
    loss = custom_loss(AlgorithmConfig(loss=mine("first_only")))
    assert loss is not None
    found = loss.differentiate(sequences(), [one.logprobs[1:] for one in sequences()])
    assert found.gradients[0] == pytest.approx([-one for one in sequences()[0].advantages[1:]])
    assert found.gradients[1] == [0.0] * 4


def sequences() -> list[TrainSequence]:
    return [
        TrainSequence(
            tokens=[1, 2, 30 + which, 40, 50],
            mask=[False, False, True, True, True],
            logprobs=[0.0, 0.0, -1.0, -2.0, -0.5],
            advantages=[0.0, 0.0, *[advantage] * 3],
        )
        for which, advantage in enumerate((0.5, -0.25))
    ]


def test_importance_sampling_of_ones_own_ends_at_the_weights_of_the_built_in_one(mine, ephebe_url):
    from palestra.training.policy import PolicyStart
    from palestra.training.tinker_policy import TinkerPolicy

    own = custom_loss(AlgorithmConfig(loss=mine("importance_sampling")))
    assert own is not None

    async def trained(loss: Any) -> tuple[dict[str, float], dict[str, float], list[list[float]]]:
        async with TinkerPolicy.open(ephebe_url, "ephebe", PolicyStart(rank=4, seed=1)) as policy:
            adam, batch = AdamParams(learning_rate=1e-2), sequences()
            updates = [await policy.update(batch, loss, {}, adam) for _ in range(2)]
            return updates[1].metrics, updates[1].custom, (await policy.forward(batch)).logprobs

    metrics, custom, logprobs = asyncio.run(trained(own))
    built_in_metrics, none, built_in_logprobs = asyncio.run(trained("importance_sampling"))
    for name in ("loss:sum", "grad_norm"):
        assert metrics[name] == pytest.approx(built_in_metrics[name], rel=1e-4)
    for found, expected in zip(logprobs, built_in_logprobs, strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
    assert (custom.keys(), none) == ({"ratio", "sequences"}, {})


def test_a_run_learns_by_functions_of_ones_own(run_training, mine):
    own = {"advantage": mine("centred"), "loss": mine("importance_sampling"), "minibatches": 2}
    built_in = own | {"advantage": "mean_baseline", "loss": "importance_sampling"}
    runs = [run_training(name, steps=1, rollout=FEW, algorithm=one) for name, one in (("own", own), ("not", built_in))]
    rows = [run.read_metrics()[0] for run in runs]
    assert rows[0]["custom/sequences"] == rows[0]["batch/sequences"] / 2
    assert rows[0]["custom/ratio"] == pytest.approx(1, abs=0.2)
    assert rows[0]["optim/grad_norm"] == pytest.approx(rows[1]["optim/grad_norm"], rel=1e-3)
    assert rows[0]["loss/sum"] == pytest.approx(rows[1]["loss/sum"], abs=1e-4)


def test_a_loss_that_fails_in_a_run_ends_it_with_what_is_wrong(run_training, mine):
    check_functions(AlgorithmConfig(loss=mine("breaks_later")))
    with pytest.raises(FunctionError, match="returned the loss nan; it and its gradient must be finite"):
        run_training("broken", steps=1, rollout=FEW, algorithm={"loss": mine("breaks_later")})


def test_the_examples_are_what_they_say(monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    config = AlgorithmConfig(advantage="my_advantage:brevity", loss="my_loss:proximal", loss_config={"beta": 0.5})
    check_functions(config)
    group = make_group("g", [1.0, 1.0, 0.0, 0.0])
    group.rollouts[1].turns[0].tokens *= 2  # twice as long
    group.rollouts[1].turns[0].logprobs *= 2
    batch = build_batch([group], make_config(algorithm={"advantage": "my_advantage:brevity", "normalize": "none"}))
    assert {row.rollout: row.advantages[-1] for row in batch.sequences} == {
        "g-0": 0.5,
        "g-1": 0.25,
        "g-2": -0.5,
        "g-3": -0.5,
    }
    loss = custom_loss(config)
    assert loss is not None
    rows = sequences()
    still = loss.differentiate(rows, [row.logprobs[1:] for row in rows])
    assert still.loss == pytest.approx(-sum(sum(row.advantages) for row in rows))
    moved = loss.differentiate(rows, [[one - 0.1 for one in row.logprobs[1:]] for row in rows])
    assert moved.metrics == {"moved": pytest.approx(0.1)}


def test_the_examples_train(run_training, monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    algorithm = {"advantage": "my_advantage:brevity", "loss": "my_loss:proximal"}
    run = run_training("examples", steps=1, rollout=FEW, algorithm=algorithm)
    (row,) = run.read_metrics()
    assert row["custom/moved"] == pytest.approx(0, abs=1e-4)
    assert row["optim/grad_norm"] > 0
