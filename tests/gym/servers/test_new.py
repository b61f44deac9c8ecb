"""`palestra gym new` makes a server whose tests pass as it is; `palestra gym test` finds what is wrong with one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from palestra.cli import gym_new
from palestra.gym.checking import check_folder, own_settings, read_rows
from palestra.gym.config import GymSources, load_gym
from palestra.gym.errors import GymConfigError
from palestra.gym.records import PARAMS
from palestra.gym.testing import opened, server_beside


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a new server `tally` in it; we stand in it."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(gym_new.new, ["tally"])
    assert result.exit_code == 0, result.output
    return tmp_path / "resources_servers" / "tally"


def checked(*arguments: str) -> Result:
    return CliRunner().invoke(gym_new.test, arguments)


def test_its_tests_pass_as_it_was_made(made: Path) -> None:
    command = [str(Path(sys.executable).with_name("palestra")), "gym", "test", "tally"]
    plain = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # those of this machine take seconds to load
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=plain)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "each of them can be begun" in result.stdout
    assert "3 passed" in result.stdout


def test_its_config_loads_and_its_rows_fit_its_server(made: Path) -> None:
    files = ("resources_servers/tally/configs/tally.yaml", "responses_api_models/vllm_model/configs/vllm_model.yaml")
    policy = {"policy_base_url": "http://127.0.0.1:1/v1", "policy_api_key": "none", "policy_model_name": "none"}
    config = load_gym(GymSources(files=files, roots=(), overrides=(), initial=policy))
    assert set(config.servers) == {"tally", "tally_agent", "policy_model"}
    rows = read_rows(made / "data/example.jsonl").values()
    with opened(server_beside(str(made / "tests/test_app.py")), **own_settings(made)) as server:
        tools = [one.as_param() for one in server.server.tool_specs()]
    assert all(row[PARAMS]["tools"] == tools for row in rows)
    assert all(row["agent_ref"]["name"] == "tally_agent" for row in rows)


@pytest.mark.parametrize("name", ["verify", "Tally", "1st", "a-b", "../x", "class", ""])
def test_names_that_cannot_be_are_refused(name: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(gym_new.new, ["--below", str(tmp_path), "--", name])
    assert result.exit_code == 1
    assert "cannot be a server's name" in result.output
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(made: Path) -> None:
    (made / "app.py").write_text("mine")
    result = CliRunner().invoke(gym_new.new, ["tally"])
    assert result.exit_code == 1
    assert "exists already" in result.output
    assert (made / "app.py").read_text() == "mine"


def test_an_unknown_server_is_told_with_the_nearest(made: Path) -> None:
    result = checked("tali")
    assert result.exit_code == 1
    assert "did you mean: tally?" in result.output


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "example.jsonl:1: not JSON"),
        ("[]", "a row is an object with responses_create_params"),
        (json.dumps({PARAMS: {"input": "x"}, "initial_count": "many"}), "example.jsonl:1: /seed_session answered 422"),
    ],
)
def test_rows_that_cannot_be_played_are_found(made: Path, line: str, words: str) -> None:
    (made / "data/example.jsonl").write_text(line + "\n")
    with pytest.raises(GymConfigError, match=words):
        check_folder(made)
    assert checked("resources_servers/tally").exit_code == 1


def test_shipped_agents_are_found_by_kind() -> None:
    assert checked("responses_api_agents/simple_agent").exit_code == 0
    assert checked("resources_servers/simple_agent").exit_code == 1
