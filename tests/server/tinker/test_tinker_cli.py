"""The `tinker` command line against a real server. In process but once: its start takes longer than its work."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import tinker
from click.testing import CliRunner, Result
from tinker.cli.__main__ import main_cli

BASE = "Qwen/Qwen3-8B"

Cli = Callable[..., Result]
AsJson = Callable[..., Any]


@pytest.fixture(scope="module")
def paths(server: Any) -> list[str]:
    """Two checkpoints of one run, whose session is over."""
    client = server.client()
    training = client.create_lora_training_client(BASE, rank=4, seed=2)
    paths = [training.save_state(name).result().path for name in ("one", "two")]
    client.close("success").result()
    return paths


@pytest.fixture
def cli(server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Cli:
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", server.key)
    monkeypatch.setenv("HOME", str(tmp_path))

    def run(*args: str, check: bool = True, **options: Any) -> Result:
        result = CliRunner().invoke(main_cli, list(args), **options)
        assert not check or result.exit_code == 0, f"{args}: {result.output} {result.exception!r}"
        return result

    return run


@pytest.fixture
def as_json(cli: Cli) -> AsJson:
    return lambda *args: json.loads(cli("--format", "json", *args).stdout)


def run_of(path: str) -> str:
    return path.removeprefix("tinker://").partition("/")[0]


@pytest.mark.slow
def test_the_command_itself(server):
    assert "Tinker accessible: yes" in server.tinker("auth", "status").stdout


def test_version_and_models(cli):
    assert tinker.__version__ in cli("version").stdout
    assert BASE in cli("model", "list").stdout


def test_runs(cli, as_json, paths):
    run_id = run_of(paths[0])
    assert run_id in {run["training_run_id"] for run in as_json("run", "list", "--limit", "0")["runs"]}
    info = as_json("run", "info", run_id)
    assert (info["training_run_id"], info["base_model"], info["lora_rank"]) == (run_id, BASE, 4)
    missing = cli("run", "info", "nobody:train:0", check=False)
    assert missing.exit_code == 1
    assert "no such training run: nobody:train:0" in str(vars(missing.exception))


def test_checkpoints(cli, as_json, paths):
    listed = {c["tinker_path"] for c in as_json("checkpoint", "list", "--run-id", run_of(paths[0]))["checkpoints"]}
    assert listed == set(paths)
    assert as_json("checkpoint", "info", paths[0])["tinker_path"] == paths[0]
    assert "weights/one" in cli("checkpoint", "list").stdout


def test_publish_ttl_and_delete(server, cli, as_json, paths):
    client = server.client()
    training = client.create_training_client_from_state(paths[0])
    path = training.save_state("for-a-while").result().path
    client.close("success").result()
    cli("checkpoint", "publish", path)
    cli("checkpoint", "set-ttl", "--ttl", "7200", path)
    info = as_json("checkpoint", "info", path)
    assert info["public"] is True
    assert info["expires_at"]
    cli("checkpoint", "unpublish", path)
    cli("checkpoint", "set-ttl", "--remove", path)
    info = as_json("checkpoint", "info", path)
    assert (info["public"], info["expires_at"]) == (False, None)
    cli("checkpoint", "delete", "--yes", path)
    assert path not in {c["tinker_path"] for c in as_json("checkpoint", "list")["checkpoints"]}


def test_download_leaves_a_peft_folder_and_no_export(cli, as_json, paths, tmp_path):
    cli("checkpoint", "download", paths[0], "--output", str(tmp_path / "here"))
    (folder,) = (tmp_path / "here").iterdir()
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
    assert (folder / "adapter_model.safetensors").stat().st_size > 0
    ids = {c["checkpoint_id"] for c in as_json("checkpoint", "list")["checkpoints"]}
    assert "external_weights/download" not in ids


def test_login_and_logout(cli, monkeypatch):
    monkeypatch.delenv("TINKER_API_KEY")
    assert "Logged in as local" in cli("auth", "login", input="tml-abc\n").stdout
    assert "Tinker accessible: yes" in cli("auth", "status").stdout
    assert "Removed credential 'local'" in cli("auth", "logout").stdout


def test_a_trace_cannot_be_exported(cli, paths):
    refused = cli("session", "export-trace", run_of(paths[0]).partition(":")[0], check=False)
    assert refused.exit_code != 0
    assert "this server stores no traces" in f"{refused.output} {refused.exception} {vars(refused.exception)}"


def test_nothing_is_billed(as_json):
    assert as_json("billing", "checkpoint-storage")["data"] == []
