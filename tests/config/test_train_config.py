from __future__ import annotations

from pathlib import Path

import pytest

from palestra.config import ConfigError, dump_config
from palestra.config.bundled import BUNDLED, EPHEBE, EPHEBE_SHELL, bundled_model, find_config_file
from palestra.config.train import DpoConfig, GrpoConfig, OptimizerConfig, SftConfig, load_train_config
from palestra.training.loops.lr_schedule import adam_at, learning_rate

SHIPPED = sorted([*(BUNDLED / "configs").glob("*.yaml"), *(Path(__file__).parents[2] / "examples").glob("*.yaml")])


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_every_config_we_ship_loads_and_survives_being_saved(file, tmp_path):
    config = load_train_config([file], [])
    (saved := tmp_path / "saved.json").write_text(dump_config(config))
    assert load_train_config([saved], []) == config


def test_the_kind_decides_what_is_expected():
    assert isinstance(load_train_config([], ["environments=[{name: x}]"]), GrpoConfig)
    assert isinstance(load_train_config([], ["kind=sft", "data=x.jsonl"]), SftConfig)
    assert isinstance(load_train_config([], ["kind=dpo", "data=x.jsonl"]), DpoConfig)
    with pytest.raises(ConfigError, match="data is missing"):
        load_train_config([], ["kind=sft"])
    with pytest.raises(ConfigError, match=r"unknown kind .gpro.*did you mean grpo"):
        load_train_config([], ["kind=gpro"])


def test_settings_of_rollouts_that_continue_need_what_they_are_for():
    for setting, needed in (
        ("in_flight=continue", "asynchronous.enabled=true"),
        ("older_keys=keep", "in_flight=continue"),
    ):
        with pytest.raises(ConfigError, match=needed):
            load_train_config([], ["environments=[{name: x}]", f"asynchronous.{setting}"])


def test_a_saved_config_lies_below_files_and_overrides(tmp_path):
    saved = {"environments": [{"name": "x"}], "steps": 5, "seed": 3}
    (file := tmp_path / "more.yaml").write_text("steps: 7\n")
    config = load_train_config([file], ["seed=4"], saved)
    assert (config.steps, config.seed) == (7, 4)


def test_names_of_what_ships_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config_file("stockroom").is_file()
    assert bundled_model(EPHEBE) == BUNDLED / EPHEBE
    assert bundled_model(EPHEBE_SHELL) == BUNDLED / EPHEBE_SHELL
    assert bundled_model("elsewhere") is None
    Path("stockroom").write_text("steps: 1")  # a file of one's own wins
    assert find_config_file("stockroom") == Path("stockroom")
    with pytest.raises(FileNotFoundError, match="did you mean arithmetic"):
        find_config_file("arithmetics")


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_the_learning_rate_warms_up_and_falls(schedule, rates):
    config = OptimizerConfig(lr=1.0, warmup_steps=2, schedule=schedule)
    assert [learning_rate(config, step, 6) for step in range(6)] == pytest.approx(rates, abs=1e-6)
    assert adam_at(config, 0, 6).learning_rate == 0.5
