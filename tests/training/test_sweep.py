"""Runs of a sweep train together at one server: each as it would alone, and none ends another."""

from __future__ import annotations

import asyncio
import json
import math
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from palestra.cli import main
from palestra.config.sweep import SweepConfig
from palestra.runs.listener import RunListener, Silence
from palestra.runs.reader import RunReader, RunStatus
from palestra.sweeps.findings import find
from palestra.sweeps.folder import Decision, MemberState, PlannedMember, SweepFolder, SweepReader
from palestra.sweeps.planning import plan_sweep
from palestra.training.sweep import SweepRun
from tests.training.trainers import FEW, SMALL, merged
from tests.waiting import until
from tests.warm_start import ClientProcess, start_client

FIGURES = ("reward/mean", "loss/sum", "optim/grad_norm", "length/mean", "eval/success")


class Quiet:
    """Keeps what a sweep reports."""

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}
        self.decisions: list[Decision] = []

    def note(self, text: str) -> None: ...

    def of(self, member: PlannedMember) -> RunListener:
        return Silence()

    def ended(self, member: PlannedMember, status: RunStatus, error: Exception | None) -> None:
        if error is not None:
            self.errors[member.name] = str(error)

    def decided(self, decision: Decision) -> None:
        self.decisions.append(decision)

    def progress(self, states: Sequence[MemberState]) -> None: ...


def curve(run: RunReader) -> list[list[Any]]:
    return [[row.get(name) for name in FIGURES] for row in run.read_metrics()]


def are_close(ours: list[list[Any]], theirs: list[list[Any]]) -> bool:
    flat = [[value or 0.0 for row in rows for value in row] for rows in (ours, theirs)]
    return flat[0] == pytest.approx(flat[1], abs=2e-6)


@pytest.fixture
def run_sweep(ephebe_url: str, tmp_path: Path):
    """`run_sweep({"seed": "0..1"}, prune="halving", at_once=1, steps=4)`: a whole sweep, to its end."""

    def run(vary: dict[str, Any], at_once: int = 8, prune: str | None = None, evolve: Any = None, **settings: Any):
        saved = merged(SMALL, {"server": ephebe_url, "runs": str(tmp_path / "runs"), **settings})
        config = {"config": "-", "name": "pop", "vary": vary, "prune": prune, "evolve": evolve}
        base = [f"{key}={json.dumps(value)}" for key, value in saved.items()]
        plan, listener = plan_sweep(SweepConfig.model_validate(config), [], base), Quiet()
        with SweepFolder.create(tmp_path / "runs", plan) as folder:
            asyncio.run(SweepRun(folder, listener, at_once).run())
        return SweepReader(folder.path), listener

    return run


def test_members_are_the_runs_they_would_be_alone(run_sweep, run_training, tmp_path):
    settings = {"steps": 2, "rollout": FEW}
    found, listener = run_sweep({"seed": [0, 7], "optimizer.lr": [2e-3]}, **settings)
    assert (listener.errors, [one.status for one in found.states()]) == ({}, ["done", "done"])
    alone = run_training("alone", seed=7, **settings)
    member = RunReader(tmp_path / "runs" / "pop-1")
    assert are_close(curve(member), curve(alone))
    assert curve(member) != curve(RunReader(tmp_path / "runs" / "pop-0"))
    assert member.read_labels().tags == ["sweep:pop"]
    best = find(found).best
    assert best is not None
    assert best.members == ["pop-0", "pop-1"]


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 3])
def test_the_worst_run_goes_on_with_the_weights_of_the_best_one(run_sweep, at_once):
    settings = {"steps": 3, "rollout": FEW, "eval": {"every": 1, "tasks": 16}, "checkpoint": {"every": 1}}
    vary = {"optimizer.lr": [1e-7, 2e-3, 1e30]}
    guard = {"enabled": False}
    found, listener = run_sweep(vary, at_once, evolve={"every": 1}, update_guard=guard, **settings)
    assert (listener.errors, {one.status for one in found.states()}) == ({}, {"done"})
    evolved = [one for one in listener.decisions if one.kind == "evolved"]
    assert {one.step for one in evolved} == {1, 2}
    assert evolved[0].member == "pop-2"
    assert found.states()[2].settings["optimizer.lr"] < 1e-2
    run = RunReader(found.member_path("pop-2"))
    steps = [row["step"] for row in run.read_metrics()]
    assert steps in ([0, 1, 2, 3], [0, 1, 3])  # the best one may have been a step further
    (event, *_) = (row for row in run.read_events() if row["event"] == "evolved")
    assert event["run"] == evolved[0].source
    assert run.read_about()["config"]["optimizer"]["lr"] == found.states()[2].settings["optimizer.lr"]


def scaled(logprobs, sequences, scale=1.0):
    """A loss that is infinite where its scale is beyond float32."""
    parts = [(own * one.advantages).sum() for own, one in zip(logprobs, sequences, strict=True)]
    return -scale * sum(parts), {}


@pytest.mark.slow
def test_a_run_that_diverges_ends_alone(run_sweep):
    loss = {"loss": "tests.training.test_sweep:scaled"}
    found, listener = run_sweep(
        {"algorithm.loss_config": [{"scale": 1.0}, {"scale": 1e39}]}, steps=2, rollout=FEW, algorithm=loss
    )
    assert [one.status for one in found.states()] == ["done", "failed"]
    assert "must be finite" in (found.states()[1].error or "")
    assert listener.errors.keys() == {"pop-1"}
    best = find(found).best
    assert best is not None
    assert best.members == ["pop-0"]


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 3])
def test_halving_ends_the_worse_runs_and_those_that_wait_get_their_turn(run_sweep, at_once):
    settings = {"steps": 4, "rollout": FEW, "eval": {"every": 1, "tasks": 16}, "update_guard": {"enabled": False}}
    found, listener = run_sweep({"optimizer.lr": [1e30, 2e-3, 1e-3]}, at_once, "halving", **settings)
    statuses = {one.name: (one.status, one.step) for one in found.states()}
    assert statuses["pop-0"][0] == "pruned"
    assert sorted(status for status, _ in statuses.values()) == ["done", "pruned", "pruned"]
    assert [one.step for one in listener.decisions] == [1, 1, 1, 2, 2]
    if at_once == 1:  # nobody went on before the rung was decided
        assert statuses["pop-0"] == ("pruned", 1)


@pytest.mark.slow
def test_members_play_episodes_under_their_own_names(run_sweep):
    found, listener = run_sweep({"seed": [0, 1]}, steps=1, rollout=FEW, rollouts="episodes", episodes={"players": 8})
    assert (listener.errors, [one.status for one in found.states()]) == ({}, ["done", "done"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_runs_on_files_are_swept_too(ephebe_url, tmp_path, kind):
    chat = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}
    pair = {"prompt": chat["messages"][:1], "chosen": "2", "rejected": "3"}
    data = tmp_path / "data.jsonl"
    data.write_text(f"{json.dumps(chat if kind == 'sft' else pair)}\n" * 4)
    base = [f"kind={kind}", f"data={data}", "batch_size=2", "steps=2", f"server={ephebe_url}", f"runs={tmp_path}"]
    vary = {"config": "-", "name": "pop", "vary": {"optimizer.lr": [1e-3, 1e-2]}}
    plan, listener = plan_sweep(SweepConfig.model_validate(vary), [], base), Quiet()
    with SweepFolder.create(tmp_path, plan) as folder:
        asyncio.run(SweepRun(folder, listener, 2).run())
    found = find(folder)
    assert (listener.errors, found.statuses) == ({}, {"done": 2})
    assert found.metric == {"sft": "loss/mean", "dpo": "dpo/accuracy"}[kind]
    assert found.best is not None


SWEEP = ("run.json", "seed=0..1", "optimizer.lr=1e-3,2e-3", "--name", "pop")


def start(folder: Path, *arguments: str) -> ClientProcess:
    return start_client("sweep", *arguments, cwd=folder)


def finish(process: ClientProcess, timeout_s: float = 300) -> str:
    said, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, said
    return said


def steps_of(folder: Path) -> int:
    files = [folder / "runs" / f"pop-{n}" / "metrics.jsonl" for n in range(4)]
    return sum(len(file.read_bytes().splitlines()) for file in files if file.exists())


def wait_for_a_step(folder: Path, process: ClientProcess) -> None:
    come = steps_of(folder)
    until(lambda: steps_of(folder) > come or process.poll() is not None, timeout_s=100)


def server_of(folder: Path) -> psutil.Process | None:
    place = str(folder / "runs" / "pop" / "engine")
    found = [p for p in psutil.process_iter(["cmdline"]) if place in (p.info["cmdline"] or [])]
    return found[0] if found else None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_sweep_survives_kills_of_its_trainer_and_of_its_server(tmp_path, seed):
    """Again and again, at any moment; every run ends on the curve that it has when nobody kills anything."""
    rng = random.Random(seed)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
        settings = {"steps": 4, "rollout": FEW, "eval": {"every": 2, "tasks": 8}, "checkpoint": {"every": 1}}
        (folder / "run.json").write_text(json.dumps(merged(SMALL, settings)))
    finish(start(whole, *SWEEP))
    process = start(cut, *SWEEP)
    for is_server in (True, False, True, False):
        wait_for_a_step(cut, process)
        time.sleep(rng.uniform(0, 2))
        if process.poll() is not None:
            break
        if is_server:
            if (server := server_of(cut)) is not None:
                server.kill()
            continue
        process.send_signal(signal.SIGKILL)
        process.wait()
        until(lambda: server_of(cut) is None, timeout_s=60)
        process = start(cut, "--resume", "pop")
    finish(process)
    for n in range(4):
        ours, theirs = (RunReader(folder / "runs" / f"pop-{n}") for folder in (cut, whole))
        assert ours.status() is RunStatus.DONE
        assert [row["step"] for row in ours.read_metrics()] == list(range(5))
        assert are_close(curve(ours), curve(theirs)), n


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_sweep_that_evolves_survives_kills(tmp_path, seed):
    """Whoever takes over another one's weights does so once, and ends with the settings that were decided."""
    rng = random.Random(seed)
    settings = {"steps": 6, "rollout": FEW, "eval": {"every": 2, "tasks": 8}, "checkpoint": {"every": 1}}
    (tmp_path / "run.json").write_text(json.dumps(merged(SMALL, settings)))
    process = start(tmp_path, *SWEEP, "--evolve")
    for is_server in (False, True, False, False):
        wait_for_a_step(tmp_path, process)
        time.sleep(rng.uniform(0, 2))
        if process.poll() is not None:
            break
        if is_server:
            if (server := server_of(tmp_path)) is not None:
                server.kill()
            continue
        process.send_signal(signal.SIGKILL)
        process.wait()
        until(lambda: server_of(tmp_path) is None, timeout_s=60)
        process = start(tmp_path, "--resume", "pop")
    finish(process)
    found = SweepReader(tmp_path / "runs" / "pop")
    evolved = [one for one in found.decisions() if one.kind == "evolved"]
    assert evolved
    decided = [(one.member, one.step) for one in found.decisions() if one.kind != "paused"]
    assert sorted(decided) == [(f"pop-{n}", step) for n in range(4) for step in (2, 4)]  # each once
    for state in found.states():
        run = RunReader(found.member_path(state.name))
        assert run.status() is RunStatus.DONE
        steps = [row["step"] for row in run.read_metrics()]
        assert steps == sorted(set(steps))  # none twice; whoever took over goes on where its source was
        assert (steps[0], steps[-1]) == (0, 6)
        taken = {row["at"] for row in run.read_events() if row["event"] == "evolved"}
        assert taken == {one.step for one in evolved if one.member == state.name}
        assert run.read_about()["config"]["optimizer"]["lr"] == state.settings["optimizer.lr"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_sweep_over_the_demo_finds_a_setting_no_worse_than_the_shipped_one(tmp_path):
    """Of rates drawn from a whole decade; two standard errors of 256 tasks are allowed."""
    rates = "optimizer.lr=loguniform(1e-3,1e-2)"
    finish(start(tmp_path, "demo", rates, "--sample", "8", "--prune", "halving", "--name", "pop", "--json"), 3000)
    finish(start_client("train", "demo", "--name", "shipped", "--display", "none", cwd=tmp_path))
    best = find(SweepReader(tmp_path / "runs" / "pop")).best
    assert best is not None
    shipped = [
        row["eval/success"] for row in RunReader(tmp_path / "runs" / "shipped").read_metrics() if "eval/success" in row
    ]
    assert best.mean >= shipped[-1] - 2 * math.sqrt(0.25 / 256)


@pytest.mark.slow
def test_students_of_one_teacher_are_swept_too(run_sweep):
    settings = {"kind": "distill", "teachers": [{"model": "ephebe"}], "steps": 1, "rollout": FEW}
    found, listener = run_sweep({"optimizer.lr": [1e-4, 1e-3]}, **settings)
    assert (listener.errors, [one.status for one in found.states()]) == ({}, ["done", "done"])
    assert all("kl/teacher" in RunReader(found.member_path(f"pop-{n}")).read_metrics()[-1] for n in range(2))


@pytest.mark.slow
def test_a_member_is_an_ordinary_run_afterwards(tmp_path, monkeypatch):
    """It goes on alone, from its weights in the sweep's folder, and its checkpoints can be exported."""
    monkeypatch.chdir(tmp_path)
    settings = {"steps": 1, "rollout": FEW, "eval": {"every": 1, "tasks": 8}, "checkpoint": {"every": 1}}
    (tmp_path / "run.json").write_text(json.dumps(merged(SMALL, settings)))
    said = finish(start(tmp_path, "run.json", "seed=0..1", "--name", "pop", "--json"))
    assert '"metric": "eval/success"' in said
    done = CliRunner().invoke(main, ["train", "--resume", "pop-1", "steps=2"])
    assert (done.exit_code, "continuing after step 1" in done.output) == (0, True), done.output
    done = CliRunner().invoke(main, ["checkpoint", "export", "pop-1@2", "adapter"])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(main, ["sweep", "show", "pop", "--json"])
    assert [one["step"] for one in json.loads(done.stdout)["members"]] == [1, 2]
