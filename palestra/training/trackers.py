"""Sends a run's metrics to experiment trackers."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from palestra.config.train import TrackerConfig
from palestra.runs.facts import flatten
from palestra.runs.reader import RunStatus
from palestra.runs.record_files import RunError
from palestra.runs.writer import EventKind, RunFolder
from palestra.util.json_types import JsonObject

log = logging.getLogger(__name__)

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "tensorboard": "tensorboardX", "trackio": "trackio"}
MLFLOW_BATCH = 1000  # the most that one call of its API accepts
MLFLOW_PARAMS = 100


class Tracker(Protocol):
    """An experiment tracker. Both methods may block on the network: call them outside of the event loop."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def finish(self, status: RunStatus) -> None: ...


class Trackers:
    """All trackers of a run, combined into one that never raises. The first failure of each is noted in the run's
    events."""

    def __init__(self, run: RunFolder, trackers: Sequence[tuple[str, Tracker]]) -> None:
        self._run, self._trackers = run, trackers
        self._complained: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        for kind, tracker in self._trackers:
            self._try(kind, lambda tracker=tracker: tracker.log(step, numbers))

    def finish(self, status: RunStatus) -> None:
        for kind, tracker in self._trackers:
            self._try(kind, lambda tracker=tracker: tracker.finish(status))

    def _try(self, kind: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # boundary: code and servers of others
            if kind not in self._complained:
                self._complained.add(kind)
                warn(self._run, kind, error)


def open_trackers(configs: Sequence[TrackerConfig], run: RunFolder) -> Trackers:
    """Opens the trackers. Raises RunError for one that is not installed; one that cannot be reached is left out, with a
    warning."""
    opened: list[tuple[str, Tracker]] = []
    for config in configs:
        try:
            opened.append((config.kind, TRACKERS[config.kind](run, dict(config.options))))
        except ModuleNotFoundError as error:
            raise RunError(
                f"tracker {config.kind!r} needs {error.name}; to install it: pip install {PACKAGES[config.kind]}"
            ) from error
        except RunError:
            raise
        except Exception as error:
            warn(run, config.kind, error)
    return Trackers(run, opened)


def warn(run: RunFolder, kind: str, error: Exception) -> None:
    text = f"tracker {kind}: {type(error).__name__}: {error}; the run continues, and its own files have all metrics"
    log.warning(text)
    run.event(EventKind.WARNING, message=text)


class WandbTracker:
    """Weights & Biases; options are those of `wandb.init`. A resumed run continues the same W&B run."""

    def __init__(self, run: RunFolder, options: JsonObject) -> None:
        wandb: Any = import_module("wandb")
        known = {
            "project": "palestra",
            "name": run.name,
            "group": sweep_of(run),
            "id": unique_name(run),
            "resume": "allow",
            "dir": str(run.path / "logs"),
            "config": run.read_about()["config"],
        }
        self._run = wandb.init(**{**known, **options})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, status: RunStatus) -> None:
        self._run.finish(exit_code=0 if status in (RunStatus.DONE, RunStatus.STOPPED) else 1)


class TrackioTracker:
    """Trackio; options are those of `trackio.init`. A resumed run continues the same run there, which it finds by its
    name: the name has the time of the start, since other folders may have a run of the same name."""

    def __init__(self, run: RunFolder, options: JsonObject) -> None:
        trackio: Any = import_module("trackio")
        known = {
            "project": "palestra",
            "name": unique_name(run),
            "resume": "allow",
            "config": run.read_about()["config"],
            "embed": False,
        }
        self._run = trackio.init(**{**known, **options})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, status: RunStatus) -> None:
        self._run.finish()


class MlflowTracker:
    """MLflow; options: `tracking_uri` (default: MLFLOW_TRACKING_URI, or mlflow.db beside the runs), `experiment`,
    `tags`."""

    def __init__(self, run: RunFolder, options: JsonObject) -> None:
        mlflow: Any = import_module("mlflow")
        if unknown := options.keys() - {"tracking_uri", "experiment", "tags"}:
            raise RunError(f"tracker 'mlflow' has no option {min(unknown)!r}; it knows tracking_uri, experiment, tags")
        beside = f"sqlite:///{run.path.parent / 'mlflow.db'}"
        address = options.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI") or beside
        self._client = mlflow.MlflowClient(tracking_uri=address)
        self._entities: Any = import_module("mlflow.entities")
        pointer = run.path / "logs" / "mlflow.json"
        if pointer.is_file():
            self._id = pointer.read_text(encoding="utf-8").strip().strip('"')
            self._client.update_run(self._id, status="RUNNING")
            return
        experiment = self._experiment(options.get("experiment", "palestra"), run if address == beside else None)
        tags = {**({"sweep": sweep} if (sweep := sweep_of(run)) else {}), **(options.get("tags") or {})}
        made = self._client.create_run(experiment, run_name=run.name, tags=tags or None)
        self._id = made.info.run_id
        self._write_params(run.read_about()["config"])
        run.write_json("logs/mlflow.json", self._id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        rows = [self._entities.Metric(name, value, now_ms, step) for name, value in metrics.items()]
        for first in range(0, len(rows), MLFLOW_BATCH):
            self._client.log_batch(self._id, metrics=rows[first : first + MLFLOW_BATCH])

    def finish(self, status: RunStatus) -> None:
        ok = status in (RunStatus.DONE, RunStatus.STOPPED)
        self._client.set_terminated(self._id, "FINISHED" if ok else "FAILED")

    def _experiment(self, name: str, beside: RunFolder | None) -> str:
        if found := self._client.get_experiment_by_name(name):
            return found.experiment_id
        artifacts = (beside.path.parent / "mlflow").as_uri() if beside else None
        return self._client.create_experiment(name, artifact_location=artifacts)

    def _write_params(self, config: JsonObject) -> None:
        params = [self._entities.Param(key, str(value)[:6000]) for key, value in flatten(config).items()]
        for first in range(0, len(params), MLFLOW_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + MLFLOW_PARAMS])


class TensorboardTracker:
    """TensorBoard; options are those of tensorboardX's SummaryWriter. Files are in the run's folder: `tensorboard
    --logdir runs`."""

    def __init__(self, run: RunFolder, options: JsonObject) -> None:
        self._open = import_module("tensorboardX").SummaryWriter
        # The name of a file has its second only: another attempt in the same second would overwrite it.
        suffix = f".{run.attempt}"
        self._options = {"logdir": str(run.path / "tensorboard"), "filename_suffix": suffix, **options}
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:  # only now is it known from which step a resumed run writes again
            self._writer = self._open(**{"purge_step": step, **self._options})
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, status: RunStatus) -> None:
        if self._writer is not None:
            self._writer.close()


def sweep_of(run: RunFolder) -> str | None:
    """The sweep that a run belongs to; trackers show its runs as a group."""
    return run.read_about()["facts"].get("sweep")


def unique_name(run: RunFolder) -> str:
    """A name that no other run has, the same at every attempt."""
    return re.sub(r"[^\w-]", "-", f"{run.name}-{run.read_about()['created']:.0f}")


TRACKERS: dict[str, Callable[[RunFolder, JsonObject], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "tensorboard": TensorboardTracker,
    "trackio": TrackioTracker,
}
