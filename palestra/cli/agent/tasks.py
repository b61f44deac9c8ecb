"""`palestra agent task list`, `verify`, `convert` and `warm-up`: coding tasks without an agent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from palestra.cli.output import FAILED, one_line_errors, print_json
from palestra.util.atomic_files import naming

if TYPE_CHECKING:
    from palestra.coding import CodingTask, CodingVerdict

FOLDER = click.Path(path_type=Path)
backend_option = click.option(
    "--sandbox", "backend", default="local", show_default=True, help="Backend of the sandbox."
)


@click.group()
def task() -> None:
    """List coding tasks."""


@task.command("list")
@click.argument("folder", type=FOLDER, required=False)
@click.option("--export", type=FOLDER, metavar="FOLDER", help="Copy the tasks there, as folders that Harbor runs, too.")
@backend_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def list_(folder: Path | None, export: Path | None, backend: str, as_json: bool) -> None:
    """List the coding tasks of a folder, and whether each can be played with a backend. Without FOLDER, the tasks that
    come with Palestra."""
    from palestra.coding import TaskError, read_tasks
    from palestra.coding.environment import problem_with
    from palestra.coding.shipped_tasks import SHIPPED
    from palestra.coding.shipped_tasks import export as export_tasks

    with one_line_errors(TaskError):
        found = read_tasks(folder or SHIPPED)
        with naming(export or Path()):
            made = export_tasks(found, export) if export is not None else []
    problems = {one.id: problem_with(one, backend) for one in found}
    if as_json:
        print_json([{**_facts(one), "problem": problems[one.id]} for one in found])
    elif made:
        click.echo(f"{len(made)} tasks are in {export}")
    else:
        for one in found:
            click.echo(f"{one.id:<24}  {one.level:<8}  {_in_a_line(problems[one.id]) or 'yes'}")
    if any(problems.values()):
        raise SystemExit(FAILED)


def _in_a_line(problem: str | None) -> str:
    return f"no: {problem.splitlines()[0]}" if problem else ""


def _facts(task: CodingTask) -> dict[str, object]:
    return {
        "id": task.id,
        "folder": str(task.folder),
        "level": task.level,
        "tags": task.tags,
        "agent_s": task.limits.agent_s,
        "verifier_s": task.limits.verifier_s,
        "parts": {one.name: one.weight for one in task.parts},
        "has_solution": task.solution is not None,
    }


@click.command()
@click.argument("folder", type=FOLDER)
@click.option(
    "--solution",
    default="gold",
    show_default=True,
    metavar="gold|none|COMMAND",
    help="What is played: the task's own solution, nothing, or a command of the shell.",
)
@backend_option
@click.option("--visible", multiple=True, metavar="FOLDER", help="Folder of this machine to show; may be repeated.")
@click.option("--log", "shows_log", is_flag=True, help="Print what the verifier printed.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def verify(folder: Path, solution: str, backend: str, visible: tuple[str, ...], shows_log: bool, as_json: bool) -> None:
    """Play the solution of a task, or of each task in a folder, in a sandbox, and print the verifier's reward. FOLDER
    may be the name of a task that comes with Palestra. The status is 1 if a task's own solution is not worth 1."""
    from palestra.coding import TaskError, VerifierError, play_solution, read_tasks
    from palestra.coding.shipped_tasks import SHIPPED
    from palestra.sandbox import SandboxError

    command = {"gold": None, "none": "true"}.get(solution, solution)
    shown = tuple(str(Path(one).absolute()) for one in visible)
    verdicts: dict[str, CodingVerdict] = {}
    with one_line_errors(TaskError, VerifierError, SandboxError):
        shipped = SHIPPED / folder
        for one in read_tasks(shipped if not folder.exists() and shipped.exists() else folder):
            verdicts[one.id] = asyncio.run(play_solution(one, backend, command, host_folders=shown))
            if not as_json:
                _print(one.id, verdicts[one.id], shows_log)
    if as_json:
        print_json([{"id": name, **_values(one, shows_log)} for name, one in verdicts.items()])
    if command is None and any(one.reward < 1 for one in verdicts.values()):
        raise SystemExit(FAILED)


def _print(name: str, verdict: CodingVerdict, shows_log: bool) -> None:
    parts = "  ".join(f"{part} {value:g}" for part, value in verdict.parts.items())
    click.echo(f"{name:<24}  {verdict.reward:<6g}  {parts}")
    if shows_log:
        click.echo(verdict.log)


def _values(verdict: CodingVerdict, shows_log: bool) -> dict[str, object]:
    found = {"reward": verdict.reward, "parts": verdict.parts, "seconds": round(verdict.seconds, 3)}
    return {**found, "log": verdict.log} if shows_log else found


@click.command()
@click.argument("rows", type=FOLDER)
@click.argument("folder", type=FOLDER)
@click.option(
    "--repositories", type=FOLDER, default=".", show_default=True, help="Where clones of the rows' repositories are."
)
@click.option("--runner", metavar="COMMAND", help="Runs the tests, whose files follow. [python3 -m pytest -rA]")
@click.option("--image", metavar="NAME", help="Image with the repository in /testbed; {instance_id} is replaced.")
def convert(rows: Path, folder: Path, repositories: Path, runner: str | None, image: str | None) -> None:
    """Make task folders in FOLDER of ROWS: JSON lines with the fields of SWE-bench or SWE-smith. Nothing is fetched."""
    from palestra.coding import TaskError, swe

    count = 0
    with one_line_errors(TaskError), naming(folder):
        for made in swe.convert(swe.read_rows(rows), repositories, folder, runner=runner or swe.RUNNER, image=image):
            click.echo(made)
            count += 1
    click.echo(f"{count} tasks were made; to try them: palestra agent verify {folder}", err=True)


@click.command("warm-up")
@click.argument("folder", type=FOLDER)
@click.option("--count", type=click.IntRange(1), default=240, show_default=True, help="Number of tasks.")
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="Number of the first task.")
@click.option("--held-out", is_flag=True, help="Tasks for evaluation, about files that no other task names.")
def warm_up(folder: Path, count: int, first: int, held_out: bool) -> None:
    """Make task folders in FOLDER of the easiest level: each asks for one short command of the shell. A task depends on
    its number alone."""
    from palestra.coding.warm_up import write_warm_up

    with naming(folder):
        made = write_warm_up(folder, count, first, held_out=held_out)
    click.echo(f"{len(made)} tasks are in {folder}; to try them: palestra agent verify {folder}")
