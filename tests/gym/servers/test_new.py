"""`palestra gym new` makes a server whose tests pass as it is; `palestra gym test` finds what is wrong with one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from palestra.cli.gym import new as gym_new
from palestra.config.train import GrpoConfig, load_train_config
from palestra.environments.gym.rows import gym_tasks
from palestra.gym.config import GymSources, load_gym
from palestra.gym.errors import GymConfigError
from palestra.gym.records import ServerInstance
from palestra.gym.registry import load_class
from palestra.gym.scaffolding import check_folder, own_settings, read_rows
from palestra.gym.testing import model_response, opened, server_beside
from palestra.types.gym import PARAMS


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a new server `tally` in it; we stand in it."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(gym_new.new, ["tally"])
    assert result.exit_code == 0, result.output
    return tmp_path / "resources_servers" / "tally"


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same with a new agent `careful`."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(gym_new.new, ["careful", "--agent"])
    assert result.exit_code == 0, result.output
    return tmp_path / "responses_api_agents" / "careful"


def checked(*arguments: str) -> Result:
    return CliRunner().invoke(gym_new.test, arguments)


def gym_test(name: str) -> str:
    command = [str(Path(sys.executable).with_name("palestra")), "gym", "test", name]
    plain = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # those of this machine take seconds to load
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=plain)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def servers_of(config: str) -> dict[str, ServerInstance]:
    policy = {"policy_base_url": "http://127.0.0.1:1/v1", "policy_api_key": "none", "policy_model_name": "none"}
    files = (config, "responses_api_models/vllm_model/configs/vllm_model.yaml")
    return load_gym(GymSources(files=files, roots=(), overrides=(), initial=policy)).servers


def test_its_tests_pass_as_it_was_made(made: Path) -> None:
    output = gym_test("tally")
    assert "each of them can be seeded" in output
    assert "3 passed" in output


@pytest.mark.e2e
def test_an_agents_tests_pass_as_it_was_made(agent: Path) -> None:
    output = gym_test("careful")
    assert "its config is valid" in output
    assert "2 passed" in output


def test_its_config_loads_and_its_rows_fit_its_server(made: Path) -> None:
    assert set(servers_of("resources_servers/tally/configs/tally.yaml")) == {"tally", "tally_agent", "policy_model"}
    with opened(server_beside(str(made / "tests/test_app.py")), **own_settings(made)) as server:
        tools = [one.as_param() for one in server.server.tool_specs()]
    for split, count in {"example": 5, "train": 256, "validation": 64}.items():
        rows = list(read_rows(made / f"data/{split}.jsonl").values())
        assert len(rows) == count
        assert all(row[PARAMS]["tools"] == tools for row in rows)
        assert all(row["agent_ref"]["name"] == "tally_agent" for row in rows)


def test_an_agents_config_loads_with_a_world_to_play_in_and_rows_for_both(agent: Path) -> None:
    found = servers_of("responses_api_agents/careful/configs/careful.yaml")
    assert set(found) == {"careful", "careful_world", "policy_model"}
    rows = list(read_rows(agent / "data/example.jsonl").values())
    assert all(row["agent_ref"]["name"] == "careful" for row in rows)
    with opened(load_class(found["careful_world"]), answer_from="last_number", symbolic=False) as world:
        for row in rows:
            fields = {name: value for name, value in row.items() if name != PARAMS}
            assert world.caller().verify(model_response(row["expected_answer"]), **fields)["reward"] == 1.0


def test_a_config_to_train_on_a_new_world_comes_with_it(made: Path) -> None:
    config = load_train_config([made / "train.yaml"], [])
    assert isinstance(config, GrpoConfig)
    (entry,) = config.environments
    assert [len(gym_tasks(entry, split)) for split in ("train", "eval")] == [256, 64]


def test_what_does_not_fit_an_agents_config_is_found(agent: Path) -> None:
    file = agent / "configs/careful.yaml"
    file.write_text(file.read_text().replace("looks: 1", "lokos: 1"))
    result = checked("careful")
    assert result.exit_code == 2
    assert f"{file}: " in result.output.replace("\n", "")
    assert "lokos: unknown setting" in result.output
    assert "did you mean: looks?" in result.output


@pytest.mark.parametrize("name", ["verify", "Tally", "1st", "a-b", "../x", "class", ""])
def test_names_that_cannot_be_are_refused(name: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(gym_new.new, ["--below", str(tmp_path), "--", name])
    assert result.exit_code == 2
    assert "cannot be a server's name" in result.output
    assert not list(tmp_path.iterdir())


def test_an_agent_cannot_have_the_name_of_one_of_ours(tmp_path: Path) -> None:
    result = CliRunner().invoke(gym_new.new, ["--below", str(tmp_path), "--agent", "simple_agent"])
    assert result.exit_code == 2
    assert "'simple_agent' is a server of Palestra itself" in result.output
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(made: Path) -> None:
    (made / "app.py").write_text("mine")
    result = CliRunner().invoke(gym_new.new, ["tally"])
    assert result.exit_code == 2
    assert "already exists" in result.output
    assert (made / "app.py").read_text() == "mine"


def test_an_unknown_server_is_told_with_the_nearest(made: Path) -> None:
    result = checked("tali")
    assert result.exit_code == 3
    assert "did you mean: tally?" in result.output


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "example.jsonl:1: not valid JSON"),
        ("[]", "a row must be an object with responses_create_params"),
        (json.dumps({PARAMS: {"input": "x"}, "stock": "many"}), "example.jsonl:1: /seed_session answered 422"),
    ],
)
def test_rows_that_cannot_be_played_are_found(made: Path, line: str, words: str) -> None:
    (made / "data/example.jsonl").write_text(line + "\n")
    with pytest.raises(GymConfigError, match=words):
        check_folder(made)
    assert checked("resources_servers/tally").exit_code == 2


def test_shipped_agents_are_found_by_kind() -> None:
    assert checked("responses_api_agents/simple_agent").exit_code == 0
    assert checked("resources_servers/simple_agent").exit_code == 3
