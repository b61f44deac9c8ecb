"""Config keys that were renamed: a new config is told the new name, and what was saved with the old one opens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from palestra.config import ConfigError
from palestra.config.evaluate import load_evaluation_config
from palestra.config.serve import load_serve_config
from palestra.config.train import load_train_config
from palestra.runs.control import saved_to_resume
from palestra.runs.writer import RunFolder
from palestra.sweeps.folder import PLAN, SweepReader
from palestra.util.renamed import RENAMED_KEYS, with_new_dotted_keys, with_new_keys
from tests.sweeps.records import create

OLD_DIFFICULTY = {"memory": 0.25, "recheck": 3, "replay_most": 7}
OLD_NAMES = {"ema_decay": "memory", "recheck_every": "recheck", "replay_buffer_size": "replay_most"}
JUDGES = "{j: {endpoint: http://127.0.0.1:9, model: m, rubric: kind}}"
ENVIRONMENT = "environments=[{name: arithmetic}]"


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS.items())
def test_an_old_key_on_the_command_line_is_told_its_new_name(old: str, new: str, tmp_path: Path) -> None:
    load, given = load_train_config, [ENVIRONMENT, f"judges={JUDGES}"]
    if old.startswith("models."):
        load, given = load_serve_config, [f"models=[{{path: {tmp_path}}}]"]
    typed = old.replace("models.*", "models.0").replace("*", "j")
    with pytest.raises(ConfigError) as caught:
        load([], [*given, f"{typed}=1"])
    shown, renamed = (key.replace("models.*", "models[0]").replace("*", "j") for key in (old, new))
    assert f"{shown} is now called {renamed} ({typed}=1)" in caught.value.problems


def test_an_old_key_in_a_file_is_told_its_new_name_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("environments: [{name: arithmetic}]\ndifficulty: {memory: 0.5}\n")
    with pytest.raises(ConfigError) as caught:
        load_train_config([file], [])
    assert caught.value.problems == [f"difficulty.memory is now called difficulty.ema_decay ({file})"]


def test_a_run_that_was_saved_with_old_keys_goes_on_and_is_evaluated_with_them(tmp_path: Path) -> None:
    config = load_train_config([], [ENVIRONMENT, f"runs={tmp_path}", f"judges={JUDGES}"])
    with RunFolder.create(tmp_path, "old", config) as run:
        file = run.config_file
    about = json.loads(file.read_text())
    about["config"]["difficulty"] = OLD_DIFFICULTY
    about["config"]["data"]["overlong"] = "keep"
    del about["config"]["rollout"]["endings"]
    about["config"]["judges"]["j"]["at_bound"] = about["config"]["judges"]["j"].pop("on_limit")
    file.write_text(json.dumps(about))

    _, saved = saved_to_resume("old", [f"runs={tmp_path}"])
    resumed = load_train_config([], [], saved)
    assert (
        resumed.model_dump()["difficulty"] | {"ema_decay": 0.25, "recheck_every": 3, "replay_buffer_size": 7}
        == (resumed.model_dump()["difficulty"])
    )
    assert resumed.model_dump()["rollout"]["endings"]["length"] == "grade"
    assert load_evaluation_config([], [file], []).judges["j"].on_limit == "stop"


def test_values_that_are_called_otherwise_are_read_too() -> None:
    saved = {"agent": {"on_timeout": "error", "on_crash": 0.5, "on_refusal": "verify"}, "data": {"overlong": "mask"}}
    agent = {"on_timeout": "mask", "on_crash": 0.5, "on_refusal": "grade"}
    assert with_new_keys(saved) == {"agent": agent, "data": {}, "rollout": {"endings": {"length": "mask"}}}
    assert with_new_dotted_keys({"agent.on_crash": ["verify", 1.0]}) == {"agent.on_crash": ["grade", 1.0]}


def test_a_sweep_that_was_saved_with_old_keys_opens(tmp_path: Path) -> None:
    create(tmp_path, {"difficulty.ema_decay": [0.2, 0.8]}).close()
    file = tmp_path / "pop" / PLAN
    plan = json.loads(file.read_text())
    plan["sweep"]["vary"] = {"difficulty.memory": [0.2, 0.8]}
    for member in plan["members"]:
        member["settings"] = {"difficulty.memory": member["settings"]["difficulty.ema_decay"]}
        difficulty = member["config"]["difficulty"]
        member["config"]["difficulty"] = {OLD_NAMES.get(name, name): value for name, value in difficulty.items()}
    file.write_text(json.dumps(plan))

    sweep = SweepReader(file.parent)
    assert sweep.config.vary == {"difficulty.ema_decay": [0.2, 0.8]}
    assert [one.settings for one in sweep.members()] == [{"difficulty.ema_decay": 0.2}, {"difficulty.ema_decay": 0.8}]
    assert [
        load_train_config([], [], one.config).model_dump()["difficulty"]["ema_decay"] for one in sweep.members()
    ] == [
        0.2,
        0.8,
    ]
