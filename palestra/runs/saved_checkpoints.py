"""Checkpoints that a run has saved: which there are, how good each was, where its files are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from palestra.runs.best_step import best_step
from palestra.runs.export_form import ExportDtype, ExportForm, GgufSettings, PublishedForm
from palestra.runs.reader import ENGINE, RunReader, RunStatus
from palestra.runs.record_files import RunError
from palestra.util.json_types import JsonObject
from palestra.util.suggest import did_you_mean

SCORES = ("eval/success", "eval/reward_mean", "eval/loss", "reward/mean", "dpo/accuracy", "loss/mean")
"""Metrics by which the best checkpoint is chosen: the first one that any checkpoint has."""
ADDRESS = "tinker://"
NAMED = re.compile(r"(.+)@(\d+|best|last)")
SELECTED = "selected"
"""Which checkpoint the name of a run means without an @."""


class CheckpointError(RunError):
    """A checkpoint cannot be read, downloaded, exported or published; the message says why."""


class CheckpointNotFound(CheckpointError, LookupError):
    """There is no such checkpoint."""


class Pointer(Struct):
    """The fields that are read of a file in the run's folder `checkpoints`."""

    step: int
    address: str


class SavedCheckpoint(Struct, frozen=True, kw_only=True):
    """A checkpoint of a run. Its files may be those of the run's own server, or at the server that the run used."""

    run: Path
    """Folder of the run."""
    step: int
    """The number of steps that were done when it was saved."""
    address: str
    """Address at the server that saved it."""
    server: str | None
    """That server; None if it was the run's own, which ended with the run."""
    folder: Path | None
    """Files of a run's own server."""
    scores: dict[str, float]
    """Metrics of its step by which checkpoints are compared."""

    @property
    def name(self) -> str:
        """The run's name and the step, as in `first@4`."""
        return f"{self.run.name}@{self.step}"

    def export(
        self,
        out: str | Path,
        form: ExportForm = "peft",
        *,
        base: str | None = None,
        base_name: str | None = None,
        dtype: ExportDtype | None = None,
        gguf: GgufSettings | None = None,
        check: bool = False,
        server: str | None = None,
        key: str | None = None,
    ) -> Path:
        """Writes the checkpoint to a new folder: `peft` is an adapter for PEFT and vLLM, `merged` a whole model,
        `gguf` a whole model as a GGUF file, written as `gguf` says, `gguf-adapter` an adapter as such a file, and
        `ollama` either with a Modelfile.

        `base` is the model it was trained on, if the checkpoint does not say it, and `base_name` what the adapter calls
        it. `dtype` is what a whole model is written in, if not as its base is stored. `check` loads the export in
        transformers and compares it with the checkpoint. `server` and `key` are for a run whose checkpoints are at a
        server. Returns the folder. Raises CheckpointError.
        """
        from palestra.checkpoints.export import export_saved

        where = {"base": base, "base_name": base_name, "server": server, "key": key}
        export_saved(self, Path(out), form, dtype=dtype, gguf=gguf or GgufSettings(), check=check, **where)
        return Path(out)

    def push(
        self,
        target: str,
        form: PublishedForm = "peft",
        *,
        public: bool = False,
        update: bool = False,
        base: str | None = None,
        base_name: str | None = None,
        dtype: ExportDtype | None = None,
        server: str | None = None,
        key: str | None = None,
    ) -> str:
        """Publishes the checkpoint at the Hugging Face hub with a model card written from the run.

        `target` is `hf:ORGANISATION/NAME`: a repository that is made, private unless `public`, or with `update` one
        that has files already. The rest is as for `export`. Returns its address. Raises CheckpointError.
        """
        from palestra.checkpoints.push import push_saved

        names = {"base": base, "base_name": base_name, "server": server, "key": key}
        return push_saved(self, target, form, public=public, update=update, dtype=dtype, **names)


class SelectedCheckpoint(Struct, frozen=True):
    """The checkpoint that a run stands for when it has ended, and why."""

    saved: SavedCheckpoint
    metric: str | None = None
    """Metric of which it has the best value; None if it is the last one."""
    value: float | None = None

    @property
    def facts(self) -> JsonObject:
        """Returns the entry `selected` of the run's summary."""
        return {"step": self.saved.step, "metric": self.metric, "value": self.value}


def checkpoint_names(run: RunReader) -> list[str]:
    """Names of the checkpoints, as in `first@4`, oldest first; no file is read."""
    steps = (file.stem.removeprefix("step_") for file in sorted((run.path / "checkpoints").glob("step_*.json")))
    return [f"{run.name}@{int(step)}" for step in steps if step.isdecimal()]


def list_checkpoints(run: RunReader) -> list[SavedCheckpoint]:
    """Oldest first. Works while the run goes on."""
    config: JsonObject = run.read_about().get("config", {})
    metrics, names = {row["step"]: row for row in run.read_metrics()}, _score_names(config)
    found = []
    for file in sorted((run.path / "checkpoints").glob("step_*.json")):
        try:
            pointer = msgspec.json.decode(file.read_bytes(), type=Pointer)
        except FileNotFoundError:
            continue  # the run has just replaced it by a newer one
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointError(f"{file} cannot be read as a checkpoint: {error}") from None
        server = config.get("server")
        found.append(
            SavedCheckpoint(
                run=run.path,
                step=pointer.step,
                address=pointer.address,
                server=server,
                folder=None if server else own_folder(run.path / ENGINE / "checkpoints", pointer.address),
                scores=_numbers(metrics.get(pointer.step, {}), names),
            )
        )
    return found


def find_checkpoint(run: RunReader, which: str = "last") -> SavedCheckpoint:
    """`which` is `last`, `best`, `selected` (while the run goes on: the last one) or the number of a step."""
    found = _some_checkpoints(run)
    if which == SELECTED:
        return found[-1] if run.status() is RunStatus.RUNNING else selected_of(run, found).saved
    if which == "last":
        return found[-1]
    if which == "best":
        return best_kept(run, found)
    for one in found:
        if str(one.step) == which:
            return one
    steps = ", ".join(str(one.step) for one in found)
    raise CheckpointNotFound(f"run {run.name} has no checkpoint {which!r}; it has last, best and the steps {steps}")


def best_kept(run: RunReader, found: Sequence[SavedCheckpoint]) -> SavedCheckpoint:
    """The best of a run's checkpoints `found`, by `checkpoint.keep_best` or the first of SCORES that any has."""
    names = _score_names(run.read_about().get("config", {}))
    return best_of(found, {one.step: one.scores for one in found}, names)


def find_selected(run: RunReader) -> SelectedCheckpoint:
    """The checkpoint that the run's `checkpoint.select` chooses of those that are kept. Raises CheckpointNotFound if
    there is none."""
    return selected_of(run, _some_checkpoints(run))


def selected_of(run: RunReader, found: Sequence[SavedCheckpoint]) -> SelectedCheckpoint:
    """The same of the run's checkpoints `found`, oldest first; there must be one."""
    rule: JsonObject = run.read_about().get("config", {}).get("checkpoint") or {}
    metric = rule.get("keep_best") if rule.get("select") == "best" else None  # older versions had no such rule
    values = {one.step: one.scores[metric] for one in found if metric in one.scores}
    if metric is None or (step := best_step(values, metric)) is None:
        return SelectedCheckpoint(found[-1])
    return SelectedCheckpoint(next(one for one in found if one.step == step), metric, values[step])


def selected_step(run: RunReader, found: Sequence[SavedCheckpoint]) -> int | None:
    """The step of the selected one of `found`; None while the run goes on, or if there are none."""
    is_over = bool(found) and run.status() is not RunStatus.RUNNING
    return selected_of(run, found).saved.step if is_over else None


def find_best(run: RunReader, metric: str) -> SavedCheckpoint:
    """The checkpoint with the best value of this metric. Raises CheckpointNotFound if none has it."""
    found = _some_checkpoints(run)
    steps = {one.step for one in found}
    rows = [row for row in run.read_metrics() if row["step"] in steps]
    scores = {row["step"]: _numbers(row, [metric]) for row in rows}
    if not any(scores.values()):
        known = sorted({name for row in rows for name in row if "/" in name})
        hint = did_you_mean(metric, known)
        raise CheckpointNotFound(f"no checkpoint of {run.name} has the metric {metric!r}; {hint}")
    return best_of(found, scores, [metric])


def _some_checkpoints(run: RunReader) -> list[SavedCheckpoint]:
    if found := list_checkpoints(run):
        return found
    raise CheckpointNotFound(f"run {run.name} has no checkpoint yet; `checkpoint.every` in its config says how often")


def split_name(name: str) -> tuple[str, str]:
    """Returns the run and which of its checkpoints: `first@4`, `first@best`; without an @ the selected one."""
    named = NAMED.fullmatch(name)
    return (named[1], named[2]) if named else (name, SELECTED)


def best_of(
    found: Sequence[SavedCheckpoint], scores: dict[int, dict[str, float]], metrics: Sequence[str] = SCORES
) -> SavedCheckpoint:
    """The checkpoint with the best score; the newest of equal ones, and of those without any."""
    metric = next((name for name in metrics if any(name in one for one in scores.values())), None)
    if metric is None:
        return found[-1]
    values = {one.step: scores[one.step][metric] for one in found if metric in scores.get(one.step, {})}
    step = best_step(values, metric)
    return next((one for one in found if one.step == step), found[-1])


def values_by_step(run: RunReader, metric: str) -> dict[int, float]:
    """The values of a metric at all steps of a run that have one."""
    return {row["step"]: value for row in run.read_metrics() for value in _numbers(row, [metric]).values()}


def selection_text(facts: JsonObject) -> str:
    """Says what was selected and why, from the `selected` of a summary."""
    why = "the last" if facts["metric"] is None else f"the best by {facts['metric']} ({facts['value']:.3f})"
    return f"step {facts['step']}, {why}"


def own_folder(root: Path, address: str) -> Path | None:
    """The files of an address below a server's folder of checkpoints: those of the latest save under its name."""
    model, kind, name = address.removeprefix(ADDRESS).split("/", 2)
    saves = list((root / model.replace(":", "_") / kind).glob(f"{name}@*"))
    return max(saves, key=lambda folder: int(folder.name.rpartition("@")[2]), default=None)


def _score_names(config: JsonObject) -> list[str]:
    """Metrics by which the checkpoints of a run with this config are compared, the most important first."""
    kept_by = (config.get("checkpoint") or {}).get("keep_best")
    return list(dict.fromkeys([*([kept_by] if kept_by else []), *SCORES]))


def _numbers(row: JsonObject, names: Sequence[str]) -> dict[str, float]:
    return {name: float(row[name]) for name in names if isinstance(row.get(name), int | float)}
