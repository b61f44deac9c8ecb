"""`palestra run stop|delete|tag|note`: a run is ended, deleted and labelled from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from click.testing import CliRunner, Result

from palestra.cli import main
from palestra.cli.run.commands import run
from palestra.runs.reader import STOP, RunReader, RunStatus
from palestra.runs.writer import RunFolder
from tests.training.records import make_config


def call(*args: object, **more: str) -> Result:
    return CliRunner().invoke(run, [*map(str, args)], prog_name="palestra run", **more)


@pytest.fixture(autouse=True)
def _runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        with RunFolder.create("runs", name, make_config()) as folder:
            folder.finish(RunStatus.DONE)


def test_a_run_that_has_ended_cannot_be_stopped_and_stays_as_it_is():
    for _ in range(2):
        done = call("stop", "first", "--until-ended")
        assert (done.exit_code, done.stdout) == (0, "first does not run (done); there is nothing to stop\n")
    assert not Path("runs/first", STOP).exists()
    assert call("stop", "nowhere").exit_code == 3


def test_a_running_run_is_asked_once_and_the_next_attempt_does_not_hear_it():
    with RunFolder.open("runs/first") as going:
        for _ in range(2):
            assert "ends after its step" in call("stop", "first").stdout
        assert going.is_asked_to_stop
        assert "it was asked to stop" in call("show", "first").stdout
        assert json.loads(call("stop", "first", "--json").stdout)["stopping"] is True
    with RunFolder.open("runs/first") as again:
        assert not again.is_asked_to_stop


def test_a_run_is_deleted_after_a_question():
    refused = call("delete", "first", input="n\n")
    assert (refused.exit_code, Path("runs/first").is_dir()) == (1, True)
    assert call("delete", "first", input="y\n").exit_code == 0
    assert not Path("runs/first").exists()
    done = call("delete", "second", "--yes", "--json")
    assert json.loads(done.stdout)["name"] == "second"
    assert not Path("runs/second").exists()
    assert call("delete", "second", "--yes").exit_code == 3


def test_a_live_run_and_what_is_no_run_are_not_deleted(micro_model):
    with RunFolder.open("runs/first"):
        refused = call("delete", "first", "--yes")
        assert refused.exit_code == 1
        assert "still going; first: palestra run stop first --until-ended" in refused.stderr
    assert RunReader("runs/first").read_events()
    refused = call("delete", micro_model, "--yes")
    assert refused.exit_code == 1
    assert (micro_model / "config.json").is_file()


def test_the_checkpoints_at_a_server_are_mentioned():
    with RunFolder.create("runs", "remote", make_config(server="http://gpu:8000")) as folder:
        folder.finish(RunStatus.DONE)
    assert "its checkpoints at http://gpu:8000 stay there" in call("delete", "remote", "--yes").stdout


def test_tags_and_notes_are_shown_and_found():
    assert call("tag", "first", "good", "lr=1e-4").stdout == "first: good, lr=1e-4\n"
    assert call("tag", "first", "good").stdout == "first: good, lr=1e-4\n"
    assert call("tag", "second", "good").exit_code == 0
    assert call("note", "first", "rewards \x1b[31mlook right").exit_code == 0
    assert call("note", "first", "compare with second " + "x" * 60).stdout == "first has 2 notes\n"
    shown = call("show", "first").stdout
    assert "tags          good, lr=1e-4" in shown
    assert "rewards \\x1b[31mlook right" in shown
    listed = call("list").stdout
    assert listed.splitlines()[0].split()[-2:] == ["tags", "note"]
    assert "compare with second xxx" in listed
    assert names("--tag", "good") == {"first", "second"}
    assert names("--tag", "good", "--tag", "lr=1e-4") == {"first"}
    assert names("--note", "compare with") == {"first"}
    assert call("list", "--tag", "none").stdout == "no such runs in runs; to see all: palestra run list\n"
    assert call("tag", "first", "good", "absent", "--remove").stdout == "first: lr=1e-4\n"
    (row,) = (row for row in json.loads(call("list", "--json").stdout) if row["name"] == "first")
    assert (row["tags"], len(row["notes"])) == (["lr=1e-4"], 2)
    assert json.loads(call("show", "first", "--json").stdout)["tags"] == ["lr=1e-4"]


def test_labels_that_cannot_be_are_refused():
    for args in (("tag", "first", "two words"), ("tag", "first", ""), ("note", "first", " ")):
        assert call(*args).exit_code == 2


def test_a_run_may_be_labelled_while_it_is_written_and_a_torn_line_is_left_out():
    with RunFolder.open("runs/first"):
        assert call("tag", "first", "live").exit_code == 0
    with Path("runs/first/labels.jsonl").open("ab") as file:
        file.write(b'{"tag": "to')
    assert call("tag", "first", "after").stdout == "first: live, after\n"


def names(*args: str) -> set[str]:
    return {row["name"] for row in json.loads(call("list", *args, "--json").stdout)}


@pytest.mark.parametrize(
    ("words", "page"),
    [(["first"], "/runs/first"), (["--runs", "runs"], "/")],
)
def test_a_run_is_viewed_by_its_name_or_its_folder(words, page):
    command = [sys.executable, "-m", "palestra.cli", "view", *words, "--port", "0"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as viewing:
        try:
            assert viewing.stdout is not None
            address = viewing.stdout.readline().split(": ", 1)[1].strip()
            assert httpx.get(address).status_code == 200
            assert urlsplit(address).path == page
        finally:
            viewing.kill()


def test_a_run_that_is_not_there_cannot_be_viewed():
    refused = CliRunner().invoke(main, ["view", "third"])
    assert (refused.exit_code, "no run 'third' in runs, and no such folder" in refused.stderr) == (2, True)
