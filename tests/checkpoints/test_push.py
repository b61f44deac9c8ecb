"""`palestra checkpoint push` with the real client of the hub, against a stand-in for the hub itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import yaml
from click.testing import CliRunner

from palestra.checkpoints import CheckpointError, export
from palestra.checkpoints.card import write_card
from palestra.checkpoints.hub import HubRepository
from palestra.checkpoints.push import prepared
from palestra.cli import main
from palestra.runs import Run
from tests.checkpoints.hub_api import Hub, serving_hub
from tests.commands import CommandProcess, Done, command_process

CONFIG = {
    "kind": "grpo",
    "steps": 6,
    "server": None,
    "model": {"name": "/home/somebody/models/base", "rank": 4, "tokenizer": None},
    "environments": [{"name": "stockroom", "tasks": "/home/somebody/tasks.jsonl"}],
    "optimizer": {"lr": 0.002},
    "trackers": [{"kind": "wandb", "options": {"host": "wandb.internal"}}],
    "card": {
        "description": "It counts cups.",
        "license": "apache-2.0",
        "data": [{"name": "org/cups", "license": "mit", "url": "https://example.org/cups"}, {"name": "our own"}],
    },
}


@pytest.fixture
def run(run: Run) -> Run:
    facts = {"packages": {"palestra": "0.1.0", "torch": "2.13.0", "secret-package": "1"}}
    run.config_file.write_text(json.dumps({"config": CONFIG, "kind": "grpo", "facts": facts}))
    return run


def settings(hub: Hub | None, **more: str) -> dict[str, str]:
    endpoint = hub.url if hub else "http://127.0.0.1:9"
    known = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": "/nowhere/hf"}
    return known | more


@pytest.fixture(scope="module")
def shared_hub() -> Iterator[Hub]:
    with serving_hub() as hub:
        yield hub


@pytest.fixture
def hub(shared_hub: Hub) -> Hub:
    shared_hub.forget()
    return shared_hub


@pytest.fixture(scope="module")
def process(shared_hub: Hub) -> Iterator[CommandProcess]:
    with command_process(**settings(shared_hub)) as process:
        yield process


def push(process: CommandProcess, *arguments: object, token: str | None = "hf_writer") -> Done:
    return process.run("checkpoint", "push", *arguments, env={"HF_TOKEN": token})


def test_a_checkpoint_is_published_with_a_card_and_loads_from_what_was_uploaded(run, hub, process, tmp_path):
    done = push(process, f"{run.path}@best", "hf:org/cups", "--base-name", "org/base", "--json")
    assert done.code == 0, done.stderr
    facts, made = json.loads(done.stdout), hub.repositories["org/cups"]
    assert (facts["repository"], facts["checkpoint"], facts["commit"]) == ("org/cups", "first@4", "c" * 40)
    assert (made.is_private, made.messages) == (True, ["Weights of first@4"])
    assert facts["files"].keys() == made.files.keys() - {".gitattributes"}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "training.png"} <= made.files.keys()
    assert json.loads(made.files["adapter_config.json"])["base_model_name_or_path"] == "org/base"
    assert run.at(4).export(tmp_path / "same", base_name="org/base")
    assert made.files["adapter_model.safetensors"] == (tmp_path / "same" / "adapter_model.safetensors").read_bytes()


def test_the_card_says_what_the_run_knows_and_nothing_of_the_machine(run):
    card = write_card(run, run.at(4), "peft", repository="org/cups", base_name="org/base", has_picture=True)
    front = yaml.safe_load(card.split("---\n")[1])
    assert front == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "base_model": "org/base",
        "base_model_relation": "adapter",
        "license": "apache-2.0",
        "datasets": ["org/cups"],
        "tags": ["palestra", "lora", "grpo"],
    }
    for part in (
        "It counts cups.",
        "the weights after step 4 of 6 of the run `first`",
        "| org/cups | mit | https://example.org/cups |",
        "| our own | not named |",
        "`stockroom` (`tasks.jsonl`)",
        "| **4** | 0.75 |",
        "| 6 | 0.6 |",
        "lr: 0.002",
        "rank: 4",
        "palestra 0.1.0, torch 2.13.0",
        "(training.png)",
        "vllm serve org/base --enable-lora",
    ):
        assert part in card
    for part in ("somebody", "wandb", "secret-package", "/home"):
        assert part not in card


def test_vllm_is_not_promised_an_adapter_that_it_refuses(run):
    model = CONFIG["model"] | {"train_unembed": True}
    run.config_file.write_text(json.dumps({"config": CONFIG | {"model": model}}))
    names = {"repository": "org/cups", "base_name": "org/base", "has_picture": False}
    assert "--enable-lora" not in write_card(run, run.last(), "peft", **names)
    assert "vllm serve org/cups" in write_card(run, run.last(), "merged", **names)


def test_a_run_without_metrics_or_data_sources_has_a_card(run):
    run.metrics_file.write_text("")
    run.config_file.write_text(json.dumps({"config": {"kind": "sft", "data": "/data/chats.jsonl", "server": None}}))
    card = write_card(run, run.last(), "merged", repository="org/cups", base_name="base", has_picture=False)
    assert "Rows of `chats.jsonl`." in card
    assert "names no data sources" in card
    assert "The run has no metrics." in card
    assert "base_model" not in card.split("---\n")[1]


def test_a_dry_run_prints_card_and_files_and_needs_no_hub(run, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    place = ["checkpoint", "push", str(run.path), "hf:org/cups"]
    done = CliRunner().invoke(main, [*place, "--dry-run", "--as", "merged"])
    assert done.exit_code == 0, done.stderr
    for part in ("# cups", "AutoModelForCausalLM", "model.safetensors", "tokenizer.json", "nothing was uploaded"):
        assert part in done.stdout


def test_what_cannot_be_published_is_one_clear_line(run, hub, process):
    for token, target, part in (
        (None, "hf:org/cups", "there is no token for"),
        ("hf_expired", "hf:org/cups", "does not accept the token; set HF_TOKEN"),
        ("hf_reader", "hf:org/cups", "the token may only read; set HF_TOKEN"),
        ("hf_stranger", "hf:org/cups", "stranger cannot write to org"),
        ("hf_writer", "hf:guarded/cups", "no right to write to guarded/cups (You don't have the rights to create"),
        ("hf_writer", "org/cups", "write hf:ORGANISATION/NAME"),
        ("hf_writer", "hf:org/--", "cannot be the name of a repository"),
    ):
        check_line(push(process, run.path, target, token=token), part)
    assert hub.repositories == {}


@pytest.mark.parametrize(
    ("offline", "part"), [("0", "does not answer: is there a network?"), ("1", "HF_HUB_OFFLINE is set")]
)
def test_without_a_network_nothing_is_uploaded(run, hub, offline, part):
    with command_process(**settings(hub if offline == "1" else None, HF_HUB_OFFLINE=offline)) as process:
        check_line(push(process, run.path, "hf:org/cups"), part)
    assert hub.repositories == {}


def test_a_repository_with_files_is_only_changed_if_asked(run, hub, process):
    assert push(process, f"{run.path}@2", "hf:org/cups", "--public").code == 0
    refused = push(process, run.path, "hf:org/cups")
    check_line(refused, "exists and has files; choose another name, or add a commit to it with --update")
    assert push(process, run.path, "hf:org/cups", "--update").code == 0
    made = hub.repositories["org/cups"]
    assert (made.is_private, made.messages) == (False, ["Weights of first@2", "Weights of first@6"])


@pytest.mark.slow
def test_an_upload_that_broke_off_is_repeated_without_sending_all_again(run):
    place = [f"{run.path}@best", "hf:org/cups"]
    with serving_hub() as hub, command_process(**settings(hub)) as process:
        hub.on_upload = "refuse"
        check_line(push(process, *place), "broke off (the storage is full); repeat the command")
        assert hub.repositories["org/cups"].files.keys() == {".gitattributes"}
        hub.on_upload = "hang"
        command = [sys.executable, "-m", "palestra.cli", "checkpoint", "push", *place]
        environment = os.environ | settings(hub, HF_TOKEN="hf_writer")
        killed = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        assert hub.is_hanging.wait(60)
        killed.kill()
        killed.wait()
        hub.on_upload = "keep"
        first = list(hub.uploads)
        done = push(process, *place)
        assert done.code == 0, done.stderr
        assert "adapter_model.safetensors" in hub.repositories["org/cups"].files
        assert len(hub.uploads) == len(set(hub.uploads)) == 2
        assert hub.uploads[: len(first)] == first


def check_line(done: Done, part: str) -> None:
    assert (done.code, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: ")
    assert part in done.stderr


def test_a_disk_without_room_is_noticed_before_anything_is_written(run, monkeypatch):
    monkeypatch.setattr(export.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10})())
    made = prepared(run.last(), HubRepository("hf:org/cups"), "merged")
    with pytest.raises(CheckpointError, match=r"needs .* kB, and 10 B are free"), made:
        pass
