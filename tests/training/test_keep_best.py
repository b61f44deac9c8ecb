"""The best evaluated weights are kept beside the newest, and a run that has ended stands for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner

import palestra.runs
from palestra.chat import ChatTokenizer
from palestra.cli import main
from palestra.config import ConfigError
from palestra.config.bundled import BUNDLED, EPHEBE
from palestra.config.train import RunConfig, load_train_config
from palestra.endpoints.aliases import AliasClient
from palestra.endpoints.model_folders import SetupError
from palestra.runs.advisories import RunAdvisor
from palestra.runs.listener import Silence
from palestra.runs.reader import RunReader, RunStatus
from palestra.runs.record_files import read_lines
from palestra.runs.run_state import RunState
from palestra.runs.saved_checkpoints import find_selected
from palestra.runs.writer import RunFolder
from palestra.training.launch import open_checkpoints, train
from palestra.training.loops.data_loop import Metrics, StepOutcome, run_steps
from palestra.training.session import TrainingSession
from palestra.training.tinker_policy import sampler_at
from palestra.training.trackers import open_trackers
from tests.training.loops.test_sft import an_sft_config
from tests.training.trainers import FEW, kill, start, wait_for_steps

RUINOUS = ("optimizer.lr=0.6", "optimizer.warmup_steps=60", "batch_size=4", "eval_every=1", "checkpoint.keep=1")
"""The first step improves the model, and the next ones, which are ever larger, undo it."""


def saved_steps(run: RunReader) -> list[int]:
    return [int(file.stem.removeprefix("step_")) for file in sorted((run.path / "checkpoints").glob("*.json"))]


def play(config: RunConfig, root: Path, name: str) -> RunFolder:
    with RunFolder.create(root, name, config) as run:
        asyncio.run(train(config, run, Silence()))
    return run


async def scores(url: str, model: str) -> list[float]:
    async with sampler_at(url, model) as sampler:
        return await sampler.score(ChatTokenizer.load(BUNDLED / EPHEBE).encode_text("What is 2 + 3? The sum is 5."))


async def aliased(url: str, name: str) -> str:
    async with AliasClient.open(url) as client:
        return next(one["model"] for one in await client.list() if one["id"] == name)


def test_a_run_that_gets_worse_ends_with_its_best_weights_and_goes_on_from_its_last(ephebe_url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = an_sft_config(ephebe_url, *RUINOUS, "steps=3", "checkpoint.every=3", "alias=kept")
    run = play(config, tmp_path / "runs", "worse")
    losses = {row["step"]: row["eval/loss"] for row in run.read_metrics()}
    assert min(losses, key=losses.__getitem__) == 1
    assert saved_steps(run) == [1, 3]  # that of step 0 was deleted when a better one came
    summary = run.read_summary()
    assert summary["selected"] == {"step": 1, "metric": "eval/loss", "value": losses[1]}
    opened = palestra.runs.open(run.path)
    assert (opened.selected().step, opened.best().step, opened.last().step) == (1, 1, 3)

    final = asyncio.run(aliased(ephebe_url, "kept"))
    assert final.endswith("/sampler_weights/final")
    assert asyncio.run(scores(ephebe_url, final)) == asyncio.run(scores(ephebe_url, opened.at(1).address))
    assert asyncio.run(scores(ephebe_url, final)) != asyncio.run(scores(ephebe_url, opened.last().address))

    done = CliRunner().invoke(main, ["checkpoint", "export", "worse", "out", "--base-name", "org/base"])
    assert (done.exit_code, "of worse@1 on" in done.output) == (0, True), done.output
    shown = CliRunner().invoke(main, ["checkpoint", "show", "worse", "--json"])
    assert json.loads(shown.stdout)["step"] == 1
    listed = json.loads(CliRunner().invoke(main, ["checkpoint", "list", "worse", "--json"]).stdout)
    assert {one["step"]: one["is_selected"] for one in listed} == {3: False, 1: True}
    assert "selected      step 1, the best by eval/loss" in CliRunner().invoke(main, ["run", "show", "worse"]).output

    resumed = CliRunner().invoke(main, ["train", "--resume", "worse", "steps=4"])
    assert "continuing after step 3" in resumed.output
    last_line = resumed.output.strip().splitlines()[-1]
    assert last_line.startswith(f"selected: step 1, the best by eval/loss ({losses[1]:.3f}); the last step has ")
    assert saved_steps(run) == [1, 4]


def test_weights_may_be_selected_and_kept_by_age_alone(ephebe_url, tmp_path):
    settings = (*RUINOUS, "steps=2", "checkpoint.every=2", "alias=null")
    run = play(an_sft_config(ephebe_url, *settings, "checkpoint.select=last"), tmp_path, "last")
    assert (saved_steps(run), run.read_summary()["selected"]["step"]) == ([1, 2], 2)
    run = play(an_sft_config(ephebe_url, *settings, "checkpoint.keep_best=null"), tmp_path, "unkept")
    assert (saved_steps(run), run.read_summary()["selected"]) == ([2], {"step": 2, "metric": None, "value": None})


def test_a_run_that_only_gets_worse_ends_as_it_began_and_can_go_on_from_there(ephebe_url, tmp_path):
    config = an_sft_config(ephebe_url, *RUINOUS[2:], "steps=1", "optimizer.lr=0.6", "alias=null")
    run = play(config, tmp_path, "worst")
    assert (saved_steps(run), run.read_summary()["selected"]["step"]) == ([0, 1], 0)
    (run.path / "checkpoints" / "step_000001.json").unlink()  # as if killed before it was written
    before = run.read_metrics()
    with RunFolder.open(run.path) as again:
        asyncio.run(train(config, again, Silence()))
    assert [row["step"] for row in read_lines(run.metrics_file) if row["attempt"] == 2] == [1, 1]
    assert run.read_metrics()[1]["eval/loss"] == pytest.approx(before[1]["eval/loss"], rel=1e-5)
    assert run.read_summary()["selected"]["step"] == 0


def test_grpo_selects_by_success_and_keeps_the_newest_of_equals(run_training):
    """Nothing can be learned from one sample at temperature 0 of the same two tasks: all evaluations are equal."""
    evaluation = {"every": 1, "tasks": 2, "temperature": 0}
    settings = {"optimizer": {"lr": 1e-9}, "checkpoint": {"every": 9, "keep": 1}, "rollout": FEW}
    run = run_training("equal", steps=2, eval=evaluation, **settings)
    values = {row["eval/success"] for row in run.read_metrics() if "eval/success" in row}
    assert len(values) == 1
    assert saved_steps(run) == [2]
    assert run.read_summary()["selected"] == {"step": 2, "metric": "eval/success", "value": values.pop()}


def test_a_killed_run_ends_with_the_same_selection(ephebe_url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = an_sft_config(ephebe_url, *RUINOUS, "steps=40", "checkpoint.every=40", "alias=null")
    (tmp_path / "run.json").write_text(settings.model_dump_json())
    process = start(tmp_path, "run.json", "--name", "cut")
    wait_for_steps(tmp_path, "cut", 5, process)  # rows: steps and evaluations, here up to step 2
    kill(process)
    cut = RunReader(tmp_path / "runs" / "cut")
    assert (cut.status(), saved_steps(cut)) == (RunStatus.KILLED, [1])
    assert palestra.runs.open(cut.path).selected().step == 1
    done = CliRunner().invoke(main, ["train", "--resume", "cut", "steps=4", "checkpoint.every=2"])
    assert "continuing after step 1" in done.output
    assert (cut.read_summary()["selected"]["step"], saved_steps(cut)) == (1, [1, 4])


def test_a_metric_that_no_evaluation_has_is_refused_with_the_nearest(ephebe_url, tmp_path):
    config = an_sft_config(ephebe_url, "checkpoint.keep_best=eval/los", "alias=null")
    with pytest.raises(SetupError, match=r"keep_best: an evaluation has no 'eval/los'; did you mean eval/loss"):
        play(config, tmp_path, "typo")
    with pytest.raises(ConfigError, match="'reward/mean' is no metric of evaluations"):
        load_train_config([], ["environments=[{name: x}]", "checkpoint.keep_best=reward/mean"])


class KilledError(BaseException):
    """Stands for the end of the process: nothing after it happens."""


class WeightStore:
    """Keeps names, as a server keeps weights, and dies at a chosen moment."""

    def __init__(self) -> None:
        self.kept: set[str] = set()
        self.moments_left: int | None = None

    def pass_moment(self) -> None:
        if self.moments_left is not None:
            self.moments_left -= 1
            if self.moments_left < 0:
                raise KilledError

    async def save(self, name: str) -> str:
        self.pass_moment()
        self.kept.add(address := f"tinker://x/weights/{name}")
        self.pass_moment()
        return address

    async def delete(self, address: str) -> None:
        self.pass_moment()
        self.kept.remove(address)
        self.pass_moment()


class Moments(Silence):
    def __init__(self, store: WeightStore) -> None:
        self._store = store

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self._store.pass_moment()

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        self._store.pass_moment()


class ScriptedLearner:
    async def step(self, position: int) -> StepOutcome:
        return StepOutcome({"loss/mean": 1.0}, position + 1)


def run_scripted(run: RunFolder, config: RunConfig, store: WeightStore, values: Sequence[float]) -> None:
    """The loop of SFT and DPO on a run's folder, where evaluations have these values."""
    checkpoints = open_checkpoints(config, run)
    state = checkpoints.newest() or RunState()
    parts = (config, store, None, run, checkpoints, state, Moments(store), open_trackers([], run), "", RunAdvisor(run))
    session = TrainingSession(*cast(Any, parts))

    async def evaluate() -> Metrics:
        return {"eval/loss": values[session.state.step]}

    asyncio.run(run_steps(config, session, ScriptedLearner(), evaluate=evaluate, eval_every=1))


@pytest.mark.parametrize(("every", "keep"), [(1, 1), pytest.param(2, 2, marks=pytest.mark.slow), (3, 1)])
def test_a_kill_at_any_moment_changes_neither_the_selection_nor_leaves_a_dead_pointer(tmp_path, every, keep):
    values = [3.0, 1.5, 1.5, 2.0, 1.0, 4.0, 5.0]
    checkpoint = {"every": every, "keep": keep}
    config = load_train_config([], [], {"kind": "sft", "data": "x", "steps": 6, "checkpoint": checkpoint})
    store = WeightStore()
    with RunFolder.create(tmp_path, "whole", config) as whole:
        run_scripted(whole, config, store, values)
    assert find_selected(whole).saved.step == 4
    assert store.kept == set(pointers(whole.path).values())
    for moment in range(60):
        name, store = f"cut{moment}", WeightStore()
        store.moments_left = moment
        try:
            with RunFolder.create(tmp_path, name, config) as run:
                run_scripted(run, config, store, values)
            break
        except KilledError:
            pass
        assert set(pointers(tmp_path / name).values()) <= store.kept
        store.moments_left = None
        with RunFolder.open(tmp_path / name) as run:
            run_scripted(run, config, store, values)
        assert saved_steps(run) == saved_steps(whole), moment
        assert find_selected(run).saved.step == 4
    else:
        raise AssertionError("the run has more moments than were tried")
    assert moment > 10


def pointers(run: Path) -> Mapping[str, str]:
    return {file.name: json.loads(file.read_text())["address"] for file in (run / "checkpoints").glob("*.json")}
