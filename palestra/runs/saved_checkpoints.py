"""Checkpoints that a run has saved: which there are, how good each was, where its files are.

Owns: choosing one by step, or the best or last one. Never touches: weights; the server that has them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from palestra.runs.reader import RunReader
from palestra.runs.record_files import RunError
from palestra.util.json_types import JsonObject

SCORES = ("eval/success", "eval/reward_mean", "reward/mean")
"""Metrics by which the best checkpoint is chosen: the first one that any checkpoint has."""
ADDRESS = "tinker://"
NAMED = re.compile(r"(.+)@(\d+|best|last)")


class CheckpointError(RunError):
    """A checkpoint cannot be read, downloaded or exported; the message says why."""


class CheckpointNotFound(CheckpointError, LookupError):
    """There is no such checkpoint."""


class Pointer(Struct):
    """What is read here of a file in the run's folder `checkpoints`."""

    step: int
    address: str


class SavedCheckpoint(Struct, frozen=True, kw_only=True):
    run: Path
    step: int
    address: str
    """Address at the server that saved it."""
    server: str | None
    """That server; None if it was the run's own, which ended with the run."""
    folder: Path | None
    """Files of a run's own server."""
    scores: dict[str, float]
    """Metrics of its step."""

    @property
    def name(self) -> str:
        return f"{self.run.name}@{self.step}"


def list_checkpoints(run: RunReader) -> list[SavedCheckpoint]:
    """Oldest first. Works while the run goes on."""
    config: JsonObject = run.read_about().get("config", {})
    metrics = {row["step"]: row for row in run.read_metrics()}
    found = []
    for file in sorted((run.path / "checkpoints").glob("step_*.json")):
        try:
            pointer = msgspec.json.decode(file.read_bytes(), type=Pointer)
        except FileNotFoundError:
            continue  # the run has just replaced it by a newer one
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointError(f"{file} cannot be read as a checkpoint: {error}") from None
        row = metrics.get(pointer.step, {})
        server = config.get("server")
        found.append(
            SavedCheckpoint(
                run=run.path,
                step=pointer.step,
                address=pointer.address,
                server=server,
                folder=None if server else own_folder(run.path / "engine" / "checkpoints", pointer.address),
                scores={name: float(row[name]) for name in SCORES if isinstance(row.get(name), int | float)},
            )
        )
    return found


def find_checkpoint(run: RunReader, which: str = "last") -> SavedCheckpoint:
    """`which` is `last`, `best` or the number of a step."""
    found = list_checkpoints(run)
    if not found:
        raise CheckpointNotFound(
            f"run {run.name} has no checkpoint yet; `checkpoint.every` in its config says how often"
        )
    if which == "last":
        return found[-1]
    if which == "best":
        return best_of(found)
    for one in found:
        if str(one.step) == which:
            return one
    steps = ", ".join(str(one.step) for one in found)
    raise CheckpointNotFound(f"run {run.name} has no checkpoint {which!r}; it has last, best and the steps {steps}")


def split_name(name: str) -> tuple[str, str]:
    """Returns the run and which of its checkpoints: `first@4`, `first@best`; without an @ the last one."""
    named = NAMED.fullmatch(name)
    return (named[1], named[2]) if named else (name, "last")


def best_of(found: Sequence[SavedCheckpoint]) -> SavedCheckpoint:
    """The checkpoint with the highest score; the newest of equal ones."""
    score = next((name for name in SCORES if any(name in one.scores for one in found)), None)
    if score is None:
        return found[-1]
    return max(found, key=lambda one: (one.scores.get(score, float("-inf")), one.step))


def own_folder(root: Path, address: str) -> Path | None:
    """The files of an address below a server's folder of checkpoints: those of the latest save under its name."""
    model, kind, name = address.removeprefix(ADDRESS).split("/", 2)
    saves = list((root / model.replace(":", "_") / kind).glob(f"{name}@*"))
    return max(saves, key=lambda folder: int(folder.name.rpartition("@")[2]), default=None)
