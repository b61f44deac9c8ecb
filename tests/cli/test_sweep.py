"""`palestra sweep`: what would run, what is wrong with it, and what was found."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from palestra.cli import main
from palestra.runs.reader import RunStatus
from tests.episodes.client.faults import Answer, Drop, FaultServer
from tests.sweeps.records import create, play


def sweep(*arguments: str):
    return CliRunner().invoke(main, ["sweep", *arguments])


def test_a_dry_run_shows_the_runs_and_how_many_fit_at_a_time(tmp_path):
    runs = f"runs={tmp_path}"
    done = sweep("arithmetic", "optimizer.lr=1e-3,3e-3", "seed=0..1", runs, "--name", "pop", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "pop-3  0.003         1" in done.stdout
    assert "4 runs, all at a time; 100 steps together; compared by eval/success" in done.stdout
    done = sweep("arithmetic", "seed=0..2", runs, "--at-once", "2", "--dry-run", "--json")
    found = json.loads(done.stdout)
    assert (found["at_once"], [one["settings"]["seed"] for one in found["members"]]) == (2, [0, 1, 2])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("answer", [Answer(200, []), Answer(200, {"owners": []}), Answer(404, b"no"), Drop()])
def test_a_server_that_names_no_quota_limits_nothing(answer, tmp_path):
    with FaultServer(answer) as server:
        done = sweep("arithmetic", "seed=0..2", f"runs={tmp_path}", "--server", server.url, "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["at_once"] == 3


def test_a_file_of_a_sweep_is_changed_on_the_command_line(tmp_path):
    file = tmp_path / "rates.yaml"
    file.write_text("config: arithmetic\nset: {steps: 4}\nvary: {optimizer.lr: 'loguniform(1e-4,1e-2)', seed: 0..1}\n")
    done = sweep(
        str(file), "seed=5", "optimizer.beta2=0.9,0.99", f"runs={tmp_path}", "--sample", "2", "--dry-run", "--json"
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["members"]
    assert [list(one["settings"]) for one in found] == [["optimizer.lr", "optimizer.beta2", "seed"]] * 4
    assert {one["config"]["steps"] for one in found} == {4}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["arithmetic"], "nothing is varied"),
        (["seed=0..1"], "give one CONFIG"),
        (["nothing", "seed=0..1"], "no config file 'nothing'"),
        (["arithmetic", "optimizer.lr=uniform(0,1)"], "--sample 16"),
        (["arithmetic", "seed=0..1", "--grid", "--sample", "2"], "give one of them"),
        (["arithmetic", "optimizer.learning_rate=1,2"], "optimizer.learning_rate"),
        (["arithmetic", "seed=0..1", "environments.0.name=gsm9"], "gsm9"),
        (["--resume", "nothing"], "no sweep 'nothing'"),
        (["--resume", "nothing", "steps=3"], "goes on as it was planned"),
        (["show", "nothing"], "no sweep 'nothing'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = sweep(*arguments)
    assert done.exit_code in (1, 2, 3), done.output
    assert said in done.output
    assert "Traceback" not in done.output
    assert not list(tmp_path.iterdir())


def test_what_was_found_is_a_table_or_json(tmp_path):
    with create(tmp_path, {"optimizer.lr": [1e-3, 1e-2], "seed": "0..1"}) as found:
        for n, value in enumerate((0.2, 0.3, 0.8, 0.6)):
            play(found, n, {0: 0.1, 8: value}, RunStatus.FAILED if n == 1 else RunStatus.DONE)
    done = sweep("show", "pop", "--runs", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "best: optimizer.lr=0.01: eval/success 0.7 ± 0.141 over 2 seeds (pop-2, pop-3)" in done.stdout
    assert "pop-1 failed after step 8: it went wrong" in done.stdout
    record = json.loads(sweep("show", "pop", "--runs", str(tmp_path), "--json").stdout)
    assert [one["status"] for one in record["members"]] == ["done", "failed", "done", "done"]
    assert record["importance"][0]["key"] == "optimizer.lr"
