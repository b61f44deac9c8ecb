"""Runs whose rollouts verifiers plays: what is trained are the tokens that the server sampled for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from palestra.config.errors import ConfigError
from palestra.config.train import load_train_config
from palestra.runs.writer import RunFolder
from tests.environments.verifiers.test_parity import DIRECT, PACKAGES, V0, V1, needs_verifiers
from tests.training.trainers import SMALL, merged

SHORT = {"steps": 2, "rollout": {"group_size": 2, "groups_per_step": 2, "max_tokens": 24, "max_context": 512}}


def entry(name: str, python: Path = V1, **config: Any) -> dict[str, Any]:
    return {"verifiers": name, "config": {"python": str(python), **config}}


@pytest.fixture
def in_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES))


def metrics_of(run: RunFolder) -> list[dict[str, float]]:
    return [row for row in run.read_metrics() if "reward/mean" in row]


@pytest.mark.e2e
@needs_verifiers
@pytest.mark.usefixtures("in_packages")
@pytest.mark.parametrize(
    "environment",
    [
        pytest.param(entry("v1_sums", env=DIRECT), id="v1"),
        pytest.param(entry("v1_guess"), id="v1 several turns"),
        pytest.param(entry("v0_sums", V0, args={"is_grouped": True}), id="v0 group rewards"),
        pytest.param(entry("v0_turns", V0), id="v0 several turns"),
    ],
)
def test_what_is_trained_are_the_tokens_that_were_sampled(run_training: Any, environment: dict[str, Any]):
    run = run_training("played", environments=[environment], data={"zero_variance": "keep"}, **SHORT)
    found = metrics_of(run)
    assert len(found) == 2
    for row in found:
        assert row["rollouts/failed"] == 0
        assert row["rollouts/total"] == 4
        # The trainer computes the logprobs of the same tokens in the same context as the sampler did.
        assert row["mismatch/logprob_abs_max"] < 1e-5


@pytest.mark.e2e
@needs_verifiers
@pytest.mark.usefixtures("in_packages")
def test_a_user_that_the_model_plays_is_not_trained(run_training: Any):
    seats = {name: {"harness": {"id": "direct"}, "max_turns": 2} for name in ("assistant", "user")}
    environment = entry("v1_sums", env={"id": "user-sim", **seats})
    run = run_training("talk", environments=[environment], data={"zero_variance": "keep"}, **SHORT)
    assert {row["agent"] for row in run.read_tokens(1)} == {"assistant"}


def config_of(**settings: Any) -> Any:
    return load_train_config([], [], merged(SMALL, settings))


def test_an_entry_by_its_package_is_an_environment_with_its_arguments():
    config = config_of(environments=[{"verifiers": "my_env", "args": {"a": 1}, "eval_args": {"a": 2}, "weight": 2}])
    (found,) = config.environments
    assert (found.name, found.weight) == ("verifiers:my_env", 2)
    assert found.config == {"args": {"a": 1}, "eval_args": {"a": 2}}
    assert config.rollouts == "episodes"
    assert config_of(environments=[{"reasoning_gym": "gcd"}]).rollouts == "local"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"environments": [{"verifiers": "a", "name": "b"}]}, "give one of: name, verifiers"),
        ({"environments": [{"verifiers": "a", "max_turns": 3}]}, "its tasks and turns are its own"),
        ({"environments": [{"verifiers": "a"}], "rollouts": "local"}, "set rollouts=episodes"),
    ],
)
def test_settings_that_verifiers_cannot_follow_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        config_of(**settings)
