"""`palestra gym` and NeMo Gym's names for it."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner

from palestra.cli import main
from palestra.cli.gym.ng import ng_collect_rollouts, ng_run
from tests.gym.supervisor.conftest import RunningGym


def test_resolve_shows_the_config_without_its_secrets(gym_root: Path) -> None:
    arguments = ["gym", "resolve", "--search-dir", str(gym_root), "-c", "all.yaml", "-m", "chosen"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "policy_model_name: chosen" in result.stdout
    assert "api_key: '****'" in result.stdout
    assert "sk-quite-secret" not in result.output


def test_status_of_a_running_gym(gym: RunningGym) -> None:
    result = CliRunner().invoke(main, ["gym", "status", "--server", gym.head])
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("lone ")]
    assert "healthy" in line
    response = CliRunner().invoke(main, ["gym", "status", "--server", gym.head, "--json"]).stdout
    assert {one["process_name"] for one in json.loads(response)} >= {"lone", "counter"}


def test_status_without_a_gym() -> None:
    result = CliRunner().invoke(main, ["gym", "status", "--server", "http://127.0.0.1:9"])
    assert result.exit_code == 4
    assert "no gym answers at http://127.0.0.1:9" in result.output


def test_ng_run_takes_nemo_gyms_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ng_run", "+config_paths=[resources_servers/nowhere.yaml]"])
    with pytest.raises(SystemExit) as ended:
        ng_run()
    assert ended.value.code == 2
    assert "there is no 'resources_servers/nowhere.yaml'" in capsys.readouterr().err


def test_dry_run_starts_nothing(gym_root: Path) -> None:
    arguments = ["gym", "run", "--search-dir", str(gym_root), "-c", "one.yaml", "head_server.port=0", "dry_run=true"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "everything is ready to start" in result.output
    assert "(foreign)" not in result.output


class Headers(BaseHTTPRequestHandler):
    """A head that remembers with which key it was asked, and has no servers."""

    keys: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        if self.path != "/readyz":  # whether it is a server of ours that starts
            self.keys.append(self.headers["Authorization"])
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b"[]")


@pytest.mark.parametrize("command", [["status"], ["aggregate", "-i", "rows.jsonl"]], ids=" ".join)
def test_a_gyms_key_is_sent_by_option_or_environment(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"_ng_task_index": 0, "_ng_rollout_index": 0, "reward": 1.0}\n')
    monkeypatch.setattr(Headers, "keys", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Headers) as head:
        threading.Thread(target=head.serve_forever, daemon=True).start()
        arguments = ["gym", *command, "--server", f"http://127.0.0.1:{head.server_port}"]
        CliRunner().invoke(main, [*arguments, "--key", "one"])
        monkeypatch.setenv("PALESTRA_GYM_KEY", "two")
        CliRunner().invoke(main, arguments)
        head.shutdown()
    assert Headers.keys == ["Bearer one", "Bearer two"]


@pytest.mark.parametrize("old", ["--head=http://127.0.0.1:9", "--server=http://127.0.0.1:9"])
def test_nemo_gyms_faces_take_head_without_a_warning(
    old: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("{}\n")
    files = ["+agent_name=a", "+input_jsonl_fpath=rows.jsonl", "+output_jsonl_fpath=o.jsonl"]
    monkeypatch.setattr(sys, "argv", ["ng_collect_rollouts", *files, old])
    with pytest.raises(SystemExit) as ended:
        ng_collect_rollouts()
    assert ended.value.code == 4
    assert capsys.readouterr().err.startswith("error: no gym answers at http://127.0.0.1:9")


def test_an_agent_that_the_gym_does_not_have_is_exit_code_3(gym: RunningGym, tmp_path: Path) -> None:
    row = {"responses_create_params": {"input": "2 + 2?"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    files = ["-i", str(tmp_path / "rows.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    result = CliRunner().invoke(main, ["gym", "collect", "--server", gym.head, "--agent", "nobody", *files])
    assert result.exit_code == 3, result.output
    assert "the gym has no agent 'nobody'" in result.stderr
