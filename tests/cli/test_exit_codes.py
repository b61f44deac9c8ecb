"""Exit codes as docs/commands.md has them: 2 for what is typed wrongly, 3 for what is not there, 4 for no answer."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from palestra.cli.output import exit_code
from palestra.config.bundled import find_config_file
from palestra.config.load import dump_config
from palestra.config.train import load_train_config
from tests.cli.tree import COMMANDS, TREE, options, palestra

DEAD = "http://127.0.0.1:9"
# What a command needs besides --server.
TO_A_DEAD_SERVER = {
    ("alias", "delete"): ["x"],
    ("alias", "list"): [],
    ("alias", "set"): ["x", "y"],
    ("chat",): ["ephebe", "hi"],
    ("checkpoint", "delete"): ["tinker://m:train:0/weights/x"],
    ("checkpoint", "export"): ["tinker://m:train:0/weights/x", "out"],
    ("checkpoint", "import"): ["adapter"],
    ("checkpoint", "list"): [],
    ("checkpoint", "push"): ["remote", "hf:me/x", "--dry-run"],
    ("episode", "cancel"): ["--run", "r", "--all"],
    ("episode", "delete"): ["r", "--yes"],
    ("episode", "export"): [],
    ("episode", "list"): [],
    ("episode", "requeue"): ["--run", "r"],
    ("episode", "show"): ["e"],
    ("episode", "watch"): [],
    ("eval",): ["arithmetic", "--limit", "1", "--name", "r", "patience_s=0.1"],
    ("gym", "aggregate"): ["-i", "rows.jsonl"],
    ("gym", "collect"): ["-i", "rows.jsonl", "-o", "out.jsonl"],
    ("gym", "reverify"): ["--rollouts", "rows.jsonl", "-o", "out.jsonl"],
    ("gym", "status"): [],
    ("run", "fork"): ["begun", "--name", "forked"],
    ("run", "replay"): ["begun", "--steps", "1..1"],
    ("sweep", "run"): ["arithmetic", "seed=0..1", "--name", "r", "server_patience_s=0.1"],
    ("train",): ["arithmetic", "--name", "r", "server_patience_s=0.1", "--display", "none"],
    ("usage",): [],
}
BEGUN = dump_config(load_train_config([find_config_file("arithmetic")], ["server_patience_s=0.1"]))
WAITING = {("agent", "play"), ("episode", "play"), ("replica",)}  # they may be there before their server


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps({"_ng_task_index": 0, "_ng_rollout_index": 0, "reward": 1.0}) + "\n")
    Path("bad.yaml").write_text("nonsense: 1\n")
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text('{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}')
    save_file({}, "adapter/adapter_model.safetensors")
    Path("runs/remote/checkpoints").mkdir(parents=True)
    Path("runs/remote/config.json").write_text(json.dumps({"config": {"server": "http://127.0.0.1:9"}}))
    Path("runs/begun").mkdir()
    Path("runs/begun/config.json").write_text(json.dumps({"config": json.loads(BEGUN), "facts": {}}))
    pointer = {"step": 1, "address": "tinker://m:train:0/weights/x"}
    Path("runs/remote/checkpoints/step_000001.json").write_text(json.dumps(pointer))


@pytest.mark.parametrize("path", TREE, ids=" ".join)
def test_an_unknown_option_is_2_in_every_command(path):
    result = palestra(*path, "--no-such-option")
    assert result.exit_code == 2
    assert "--no-such-option" in result.stderr


@pytest.mark.parametrize("path", [path for path in TREE if path not in COMMANDS], ids=" ".join)
def test_an_unknown_command_is_2_in_every_group(path):
    assert palestra(*path, "no-such-command").exit_code == 2


@pytest.mark.parametrize(
    "args",
    [
        *(["config", "show", one, "nonsense=1"] for one in ("serve", "grpo", "sft", "dpo")),
        ["serve", "nonsense=1"],
        ["serve", "-c", "bad.yaml"],
        ["serve", "-c", "nowhere.yaml"],
        ["serve", "--model", "nowhere"],
        ["serve", "--database", "mysql://x"],
        ["train"],
        ["train", "nowhere.yaml"],
        ["train", "bad.yaml"],
        ["train", "arithmetic", "nonsense=1"],
        ["train", "arithmetic", "model.name=nowhere"],
        ["train", "arithmetic", "environments=[{name: nowhere}]"],
        ["train", "arithmetic", "--name", "a/b"],
        ["train", "--resume", "x", "--name", "y"],
        ["key", "list"],
        ["key", "list", "-c", "bad.yaml"],
        ["model", "random", "m", "--family", "gpt2"],
        ["model", "info", "nowhere"],
        ["env", "play", "arithmetic", "--tasks", "nowhere.jsonl"],
        ["episode", "play", "nowhere.yaml"],
        ["episode", "list", "--server", "not-a-url"],
        ["episode", "show", "e", "--mask", "("],
        ["gym", "run", "-c", "nowhere.yaml"],
        ["gym", "resolve", "nonsense=1"],
        ["gym", "collect", "-i", "nowhere.jsonl", "-o", "o.jsonl"],
        ["gym", "aggregate", "-i", "nowhere.jsonl", "--offline"],
        ["gym", "new", "Not-A-Name"],
        ["platform", "task", "list", "--first", str(2**31)],
    ],
    ids=" ".join,
)
def test_a_mistake_in_arguments_or_config_is_2(args):
    result = palestra(*args)
    assert result.exit_code == 2, result.output
    assert result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "args",
    [
        *(["run", command, "nowhere"] for command in ("show", "compare", "export")),
        *(["checkpoint", command, "nowhere"] for command in ("list", "show")),
        ["rollout", "list", "nowhere"],
        ["rollout", "show", "nothing"],
        ["train", "--resume", "nowhere"],
        ["env", "play", "nowhere"],
        ["env", "play", "arithmetic", "--task", "none"],
        ["episode", "play", "--env", "nowhere"],
        ["platform", "app", "show", "nowhere"],
        ["platform", "play", "nowhere"],
        ["platform", "task", "show", "keys-nothing-0-1"],
        ["platform", "task", "list", "--app", "nowhere"],
        ["platform", "task", "list", "--template", "nothing"],
        ["platform", "openenv-package", "nowhere", "dir"],
        ["gym", "test", "nowhere"],
    ],
    ids=" ".join,
)
def test_what_is_named_and_not_there_is_3(args):
    result = palestra(*args)
    assert result.exit_code == 3, result.output
    assert result.stderr.startswith("error: ")


def test_the_table_has_every_command_that_asks_a_server():
    asking = {path for path, command in COMMANDS.items() if "--server" in options(command)}
    assert asking == TO_A_DEAD_SERVER.keys() | WAITING


@pytest.mark.parametrize("path", TO_A_DEAD_SERVER, ids=" ".join)
def test_a_server_that_does_not_answer_is_4_in_every_command(path):
    result = palestra(*path, *TO_A_DEAD_SERVER[path], "--server", DEAD)
    assert result.exit_code == 4, result.output
    assert result.stderr.startswith("error: ")
    assert DEAD in result.stderr
    assert "Traceback" not in result.output


def test_ctrl_c_is_130():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "palestra.cli", "episode", "list", "--server", url]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as listing:
            silent.accept()
            listing.send_signal(signal.SIGINT)
            _, said = listing.communicate(timeout=60)
    assert (listing.returncode, "Traceback" in said) == (130, False)


def test_an_error_that_is_neither_is_1():
    assert [exit_code(one("x")) for one in (RuntimeError, PermissionError)] == [1, 1]
