"""`palestra gym` and NeMo Gym's names for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from palestra.cli import main
from palestra.cli.ng import ng_run
from tests.gym.control.conftest import RunningGym


def test_resolve_shows_the_config_without_its_secrets(gym_root: Path) -> None:
    arguments = ["gym", "resolve", "--search-dir", str(gym_root), "-c", "all.yaml", "-m", "chosen"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "policy_model_name: chosen" in result.stdout
    assert "api_key: '****'" in result.stdout
    assert "sk-quite-secret" not in result.output


def test_status_of_a_running_gym(gym: RunningGym) -> None:
    result = CliRunner().invoke(main, ["gym", "status", "--head", gym.head])
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("lone ")]
    assert "healthy" in line
    told = CliRunner().invoke(main, ["gym", "status", "--head", gym.head, "--json"]).stdout
    assert {one["process_name"] for one in json.loads(told)} >= {"lone", "counter"}


def test_status_without_a_gym() -> None:
    result = CliRunner().invoke(main, ["gym", "status", "--head", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "no gym answers at http://127.0.0.1:9" in result.output


def test_ng_run_takes_nemo_gyms_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ng_run", "+config_paths=[resources_servers/nowhere.yaml]"])
    with pytest.raises(SystemExit) as ended:
        ng_run()
    assert ended.value.code == 1
    assert "there is no 'resources_servers/nowhere.yaml'" in capsys.readouterr().err


def test_dry_run_starts_nothing(gym_root: Path) -> None:
    arguments = ["gym", "run", "--search-dir", str(gym_root), "-c", "one.yaml", "head_server.port=0", "dry_run=true"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "everything is ready to be started" in result.output
    assert "(foreign)" not in result.output
