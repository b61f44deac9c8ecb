"""Trackers get what the run's files get; one that breaks or is missing never takes the run with it."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from palestra.config.train import TrackerConfig
from palestra.runs.reader import RunReader, RunStatus
from palestra.runs.record_files import RunError
from palestra.runs.writer import RunFolder
from palestra.training.trackers import PACKAGES, Trackers, open_trackers, unique_name
from tests.training.records import make_config


@pytest.fixture
def run(tmp_path):
    with RunFolder.create(tmp_path / "runs", "first", make_config()) as run:
        yield run


def tracker(kind: str, **options: object) -> list[TrackerConfig]:
    return [TrackerConfig.model_validate({"kind": kind, "options": options})]


def test_a_run_without_trackers_has_none(run):
    trackers = open_trackers([], run)
    trackers.log(1, {"reward/mean": 1.0})
    trackers.finish(RunStatus.DONE)
    assert not [event for event in RunReader(run.path).read_events() if "tracker" in json.dumps(event)]


class Recording:
    """A tracker in memory that breaks when told to."""

    def __init__(self, *, broken: bool = False) -> None:
        self.broken, self.rows = broken, []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.broken:
            raise ConnectionError("no route to host")
        self.rows.append((step, dict(metrics)))

    def finish(self, status: RunStatus) -> None:
        self.log(-1, {})


def test_a_tracker_that_breaks_is_one_warning_and_the_others_go_on(run):
    broken, sound = Recording(broken=True), Recording()
    trackers = Trackers(run, [("broken", broken), ("sound", sound)])
    for step in range(3):
        trackers.log(step, {"reward/mean": 0.5, "bad": math.nan})
    trackers.finish(RunStatus.DONE)
    assert sound.rows == [(0, {"reward/mean": 0.5}), (1, {"reward/mean": 0.5}), (2, {"reward/mean": 0.5}), (-1, {})]
    warnings = [event["message"] for event in run.read_events() if event["event"] == "warning"]
    assert warnings == [
        "tracker broken: ConnectionError: no route to host; the run continues, and its own files have all metrics"
    ]


@pytest.mark.parametrize("kind", PACKAGES)
def test_a_tracker_that_is_not_installed_says_what_to_install(run, kind):
    if importlib.util.find_spec(PACKAGES[kind]) is not None:
        pytest.skip(f"{PACKAGES[kind]} is installed")
    with pytest.raises(RunError, match=f"tracker '{kind}' needs .*pip install {PACKAGES[kind]}"):
        open_trackers(tracker(kind), run)


def play(run: RunFolder, configs: list[TrackerConfig]) -> None:
    trackers = open_trackers(configs, run)
    trackers.log(0, {"reward/mean": 0.25, "env/a_b/reward": 1.0, "bad": math.inf})
    trackers.log(1, {"reward/mean": 0.75})
    trackers.finish(RunStatus.DONE)
    assert [event["event"] for event in run.read_events()] == ["start"]


def resume(run: RunFolder, configs: list[TrackerConfig]) -> None:
    """A second attempt, which repeats the step since the checkpoint and goes on."""
    run.close()
    with RunFolder.open(run.path) as again:
        trackers = open_trackers(configs, again)
        trackers.log(1, {"reward/mean": 0.75})
        trackers.log(2, {"reward/mean": 1.0})
        trackers.finish(RunStatus.DONE)
        assert [event["event"] for event in again.read_events()] == ["start", "resume"]


def test_tensorboard_files_are_in_the_run_and_a_resumed_run_goes_on_there(run):
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed (pip install 'palestra[trackers]')")
    play(run, tracker("tensorboard"))
    (file,) = (run.path / "tensorboard").iterdir()
    assert b"reward/mean" in file.read_bytes()
    resume(run, tracker("tensorboard"))
    assert len(list((run.path / "tensorboard").iterdir())) == 2  # of one run: TensorBoard joins the files of a folder


def test_trackio_has_metrics_and_config_and_a_resumed_run_goes_on_there(run, tmp_path):
    pytest.importorskip("trackio", reason="trackio is not installed (pip install 'palestra[trackers]')")
    # In processes of their own, as runs are: trackio reads the folder of its database when it is imported.
    code = """if True:
        import sys
        from palestra.config.train import TrackerConfig
        from palestra.runs.reader import RunStatus
        from palestra.runs.writer import RunFolder
        from palestra.training.trackers import open_trackers

        attempt, path = sys.argv[1:]
        with RunFolder.open(path) as run:
            trackers = open_trackers([TrackerConfig(kind="trackio")], run)
            for step in (0, 1) if attempt == "1" else (2,):
                trackers.log(step, {"reward/mean": step / 4, "env/a_b/reward": 1.0})
            trackers.finish(RunStatus.DONE)
            assert "warning" not in [event["event"] for event in run.read_events()]
    """
    run.close()
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    for attempt in ("1", "2"):
        subprocess.run([sys.executable, "-c", code, attempt, str(run.path)], env=environment, check=True)
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    assert [(step, json.loads(found)["reward/mean"]) for _, step, found in rows] == [(0, 0.0), (1, 0.25), (2, 0.5)]


def test_mlflow_has_metrics_and_params_and_a_resumed_run_goes_on_there(run):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed (pip install 'palestra[trackers]')")
    play(run, tracker("mlflow"))
    run.close()
    with RunFolder.open(run.path) as again:
        open_trackers(tracker("mlflow"), again).log(2, {"reward/mean": 1.0})
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{run.path.parent}/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("palestra").experiment_id])
    history = client.get_metric_history(found.info.run_id, "reward/mean")
    assert [(one.step, one.value) for one in history] == [(0, 0.25), (1, 0.75), (2, 1.0)]
    assert found.data.params["rollout.group_size"] == "8"
    assert not Path("mlruns").exists()


def test_mlflow_refuses_options_it_does_not_know(run):
    pytest.importorskip("mlflow", reason="mlflow is not installed (pip install 'palestra[trackers]')")
    with pytest.raises(RunError, match="no option 'projct'; it knows tracking_uri"):
        open_trackers(tracker("mlflow", projct="x"), run)


def test_an_mlflow_that_cannot_be_reached_is_a_warning(run):
    pytest.importorskip("mlflow", reason="mlflow is not installed (pip install 'palestra[trackers]')")
    trackers = open_trackers(tracker("mlflow", tracking_uri="nonsense://nowhere"), run)
    trackers.log(0, {"reward/mean": 1.0})
    assert run.read_events()[-1]["event"] == "warning"


def test_wandb_offline_writes_into_the_run_and_a_resumed_run_has_the_same_id(run, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed (pip install 'palestra[trackers]')")
    monkeypatch.setenv("WANDB_SILENT", "true")
    play(run, tracker("wandb", mode="offline"))
    resume(run, tracker("wandb", mode="offline"))
    folders = [folder.name for folder in (run.path / "logs" / "wandb").glob("offline-run-*")]
    ids = {name.split("-", 3)[3] for name in folders}
    assert len(folders) == 2  # one for each attempt; `wandb sync` joins those of one id
    assert ids == {unique_name(run)}
