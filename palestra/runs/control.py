"""Ending, resuming and deleting a run from outside."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path

from palestra.runs.lock import RunLock
from palestra.runs.reader import ENGINE, IMITATION, STOP, RunReader, RunStatus, find_run, list_runs
from palestra.runs.record_files import RunError, write_json
from palestra.util.json_types import JsonObject


def request_stop(run: RunReader) -> bool:
    """Asks a run to end after its step. Returns False if it is not running. Asking twice changes nothing."""
    if run.read_about().get("kind") == "eval":
        raise RunError(f"{run.name} is an evaluation, which has no steps; end it with Ctrl-C where it runs")
    if run.status() is not RunStatus.RUNNING:
        return False
    for folder in (run.path, run.path / IMITATION):
        if (folder / "config.json").is_file() and not (folder / STOP).exists():
            write_json(folder / STOP, {"stop": True})
    return True


def delete_run(run: RunReader) -> None:
    """Deletes a run's folder with its checkpoints. Raises RunError if a process writes it, or if it is not a run."""
    if not run.events_file.is_file():
        raise RunError(f"{run.path} does not look like a run: it has no {run.events_file.name}; nothing is deleted")
    if users := [one.name for one in list_runs(run.path.parent) if _has_weights_in(one, run)]:
        raise RunError(
            f"{', '.join(users)} began with weights of {run.name} and keeps its own beside them; delete it first"
        )
    lock = RunLock(run.lock_file)
    try:
        shutil.rmtree(run.path)
    except OSError as error:
        raise RunError(f"{run.path} could not be deleted completely: {error}") from None
    finally:
        lock.close()


def _has_weights_in(other: RunReader, run: RunReader) -> bool:
    link = other.path / ENGINE
    return link.is_symlink() and link.resolve().is_relative_to(run.path.resolve())


def short_name(run: RunReader) -> str:
    """The shortest name that finds the run from the current folder, quoted for a shell."""
    return shlex.quote(run.name if run.path.parent == Path("runs").absolute() else str(run.path))


def view_command(run: RunReader) -> str:
    """Returns the command that shows the run in the browser."""
    here = Path.cwd()
    path = run.path.relative_to(here) if run.path.is_relative_to(here) else run.path
    return f"palestra view {shlex.quote(str(path))} --open"


def resume_command(run: RunReader) -> str:
    command = "eval" if run.read_about()["kind"] == "eval" else "train"
    return f"palestra {command} --resume {short_name(run)}"


def saved_to_resume(which: str, overrides: Iterable[str]) -> tuple[RunReader, JsonObject]:
    """The run to continue and its config, which stays in its folder. It is looked for in `runs=` of the overrides."""
    root = next((text.partition("=")[2] for text in overrides if text.startswith("runs=")), "runs")
    found = find_run(which, Path(root))
    return found, found.read_about()["config"] | {"name": found.name, "runs": str(found.path.parent)}
