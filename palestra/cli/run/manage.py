"""`palestra run stop|delete|tag|note`: what is done to a run from outside."""

from __future__ import annotations

import time
from pathlib import Path

import rich_click as click
from msgspec import to_builtins

from palestra.cli.options import renamed_option
from palestra.cli.output import fail, print_result
from palestra.cli.run.common import find, json_option, run_errors, runs_option
from palestra.runs.control import resume_command

LOOK_EVERY_S = 0.5


@click.command()
@click.argument("which", metavar="RUN")
@renamed_option("--until-ended", "wait", old="--wait", is_flag=True, help="Return when the run has ended.")
@runs_option
@json_option
def stop(which: str, wait: bool, root: Path, as_json: bool) -> None:
    """End RUN after its present step, with a checkpoint. It can be resumed. A run that has ended stays as it is."""
    with run_errors():
        from palestra.runs.control import request_stop
        from palestra.runs.reader import RunStatus

        found = find(which, root)
        is_stopping = request_stop(found)
        while wait and found.status() is RunStatus.RUNNING:
            time.sleep(LOOK_EVERY_S)
        status = found.status()
    if status is RunStatus.RUNNING:
        text = f"{found.name} ends after its step; to wait for it: --until-ended"
    elif is_stopping:
        text = f"{found.name} has ended ({status}); to go on: {resume_command(found)}"
    else:
        text = f"{found.name} does not run ({status}); there is nothing to stop"
    print_result(as_json, {"name": found.name, "status": status, "stopping": status is RunStatus.RUNNING}, text)


@click.command()
@click.argument("which", metavar="RUN")
@click.option("--yes", is_flag=True, help="Do not ask.")
@runs_option
@json_option
def delete(which: str, yes: bool, root: Path, as_json: bool) -> None:
    """Delete RUN's folder with its metrics, rollouts and checkpoints. A run that is still going is refused."""
    with run_errors():
        from palestra.runs.control import delete_run
        from palestra.runs.reader import RunStatus

        found = find(which, root)
        if found.status() is RunStatus.RUNNING:
            raise fail(f"{found.name} is still going; first: palestra run stop {which} --until-ended")
        server = found.read_about()["config"].get("server")
        if not yes:
            click.confirm(f"delete {found.path} with everything in it?", abort=True, err=True)
        delete_run(found)
    text = f"{found.path} is deleted"
    if server:
        text += f"; its checkpoints at {server} stay there: palestra checkpoint list --server {server}"
    print_result(as_json, {"name": found.name, "path": str(found.path)}, text)


@click.command()
@click.argument("which", metavar="RUN")
@click.argument("tags", metavar="TAG...", nargs=-1, required=True)
@click.option("--remove", is_flag=True, help="Take the tags away.")
@runs_option
@json_option
def tag(which: str, tags: tuple[str, ...], remove: bool, root: Path, as_json: bool) -> None:
    """Give RUN tags, by which `palestra run list --tag` finds it."""
    with run_errors():
        from palestra.runs.labels import add_tag, read_labels, remove_tag

        found = find(which, root)
        for one in tags:
            (remove_tag if remove else add_tag)(found.path, one)
        labels = read_labels(found.path)
    print_result(as_json, to_builtins(labels), f"{found.name}: {', '.join(labels.tags) or 'no tags'}")


@click.command()
@click.argument("which", metavar="RUN")
@click.argument("text", metavar="TEXT")
@runs_option
@json_option
def note(which: str, text: str, root: Path, as_json: bool) -> None:
    """Add a note to RUN, which `palestra run show` prints."""
    with run_errors():
        from palestra.runs.labels import add_note, read_labels

        found = find(which, root)
        add_note(found.path, text)
        labels = read_labels(found.path)
    print_result(as_json, to_builtins(labels), f"{found.name} has {len(labels.notes)} notes")
