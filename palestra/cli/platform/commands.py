"""`palestra platform`: the local task apps: serve them, look at them, make tasks, play one by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import rich_click as click

from palestra.cli.lazy import LazyGroup
from palestra.cli.options import warn_of_old_name
from palestra.cli.output import NOT_FOUND, USAGE, fail, needs_extra, one_line_errors, print_json, print_result
from palestra.cli.run.common import json_option, print_table
from palestra.util.atomic_files import naming
from palestra.util.json_types import JsonObject
from palestra.util.safe_text import safe_text

if TYPE_CHECKING:
    from palestra.environments.platform import PlatformTask, TaskApp, TaskKey, TaskTemplate, TaskVerdict

F = TypeVar("F", bound=Callable[..., Any])

MIB = 1 << 20
SPLITS = ["train", "eval"]
LISTED, EXPORTED, MEASURED = 3, 20, 5  # tasks of each template, if no number is given


@click.group(cls=LazyGroup, aliases={"tasks": "task"})
def platform() -> None:
    """Task apps on this machine: mail, bookings, forums and the like, with tools and verifiers."""


@platform.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8030,
    show_default=True,
    help="Port to listen at; 0 for any free port.",
)
@click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".palestra/platform"),
    show_default=True,
    metavar="DIR",
    help="Folder for instances that do not fit into memory, and for all of them during a restart.",
)
@click.option(
    "--key",
    "keys",
    multiple=True,
    envvar="PALESTRA_PLATFORM_KEYS",
    metavar="KEY",
    help="Key of a team; may be repeated. [on a loopback address every key is a team, elsewhere one key is "
    "made and shown]",
)
@click.option(
    "--public-url", metavar="URL", help="Address at which clients reach this server. [the host name they use]"
)
@click.option(
    "--max-instances",
    type=click.IntRange(1),
    default=10_000,
    show_default=True,
    help="Maximum number of live instances.",
)
@click.option(
    "--max-per-team",
    type=click.IntRange(1),
    default=10_000,
    show_default=True,
    help="Maximum number of live instances of one team.",
)
@click.option(
    "--memory-mib",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    help="Memory for instances; more of them go to disk.",
)
@click.option(
    "--ttl",
    "ttl_s",
    type=click.FloatRange(1),
    default=600,
    show_default=True,
    help="Seconds after which an unused instance ends.",
)
def serve(
    host: str,
    port: int,
    state: Path,
    keys: tuple[str, ...],
    public_url: str | None,
    max_instances: int,
    max_per_team: int,
    memory_mib: int,
    ttl_s: float,
) -> None:
    """Serve the apps: tools by MCP, instances and tasks by Fleet's API (FLEET_BASE_URL), each app as an OpenEnv
    environment at /openenv/APP."""
    from palestra.environments.platform import PlatformError

    with needs_extra("platform"):
        from palestra.environments.platform.api.serving import ServeSettings
        from palestra.environments.platform.api.serving import serve as run
        from palestra.environments.platform.pool_records import PoolLimits
    limits = PoolLimits(
        max_instances=max_instances, max_per_team=max_per_team, max_resident_bytes=memory_mib * MIB, ttl_s=ttl_s
    )
    settings = ServeSettings(host=host, port=port, folder=state, keys=keys, public_url=public_url, limits=limits)
    with one_line_errors(PlatformError, OSError):
        run(settings, announce)


def announce(url: str, made_key: str | None) -> None:
    if made_key is not None:
        click.echo(f"key (shown this once): {made_key}")
    click.echo(f"The platform is ready at {url}; for Fleet's SDK: export FLEET_BASE_URL={url}")


@platform.command()
@click.argument("key", metavar="APP")
@click.option("--data", metavar="DATA", help="Size and number of the world, such as small-17. [small-0]")
def mcp(key: str, data: str | None) -> None:
    """Serve one app to the agent that starts this command: MCP over standard input and output.

    APP may also be the key of a task, such as keys-put_number-0b-17. Then the agent gets the task as instructions, and
    the verdict is printed on standard error when it has given its answer or disconnects. Each start makes a fresh
    world, which ends with the command.

    For the config of a desktop agent; if it does not find the command, write the path that `which palestra` prints:

    \b
    {
      "mcpServers": {
        "mail": {"command": "palestra", "args": ["platform", "mcp", "mail"]}
      }
    }
    """
    import sys
    from contextlib import redirect_stdout

    from palestra.environments.platform import PlatformError
    from palestra.environments.platform.api.stdio import open_world, serve_lines
    from palestra.environments.platform.errors import UnknownName

    with one_line_errors(PlatformError, code=USAGE), one_line_errors(UnknownName):
        world = open_world(key, data, lambda verdict: tell_verdict(key, verdict))
    tell(f"{world.title} in {world.instance.seed.key}, by MCP on standard input and output, until the input ends")
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    with redirect_stdout(sys.stderr):  # any other output among the messages would end the connection
        serve_lines(world, incoming, outgoing)


def tell_verdict(key: str, verdict: TaskVerdict) -> None:
    tell("\n".join([f"{key}: score {verdict.score}", *(f"  {reason}" for reason in verdict.failed)]))


def tell(text: str) -> None:
    click.echo(safe_text(text), err=True)


@platform.command(hidden=True)
@click.argument("name", required=False)
@json_option
@click.pass_context
def apps(ctx: click.Context, name: str | None, as_json: bool) -> None:
    """`app list` and `app show` by their old name."""
    warn_of_old_name("`palestra platform apps`", f"`palestra platform app {'list' if name is None else 'show'}`")
    if name is None:
        ctx.invoke(list_apps, as_json=as_json)
    else:
        ctx.invoke(show_app, name=name, as_json=as_json)


@platform.group()
def app() -> None:
    """List the apps, or show one."""


@app.command("list")
@json_option
def list_apps(as_json: bool) -> None:
    """List the apps."""
    from palestra.environments.platform import APPS

    if as_json:
        print_json([app_facts(app) for app in APPS.values()])
        return
    rows = [[a.key, str(len(a.tools)), str(len(a.templates)), a.description] for a in APPS.values()]
    print_table([["app", "tools", "templates", ""], *rows])


@app.command("show")
@click.argument("name", metavar="APP")
@json_option
def show_app(name: str, as_json: bool) -> None:
    """Show an app's tools and task templates."""
    from palestra.environments.platform import PlatformError, app_of

    with one_line_errors(PlatformError):
        found = app_of(name)
    if as_json:
        print_json(app_facts(found))
        return
    click.echo(f"{found.title}: {found.description} ({found.version})\n\ntools")
    for tool in found.tools:
        click.echo(f"  {tool.usage}{' *' if tool.writes else ''}\n      {tool.description}")
    click.echo("  * may change something\n\ntask templates")
    shown = (*found.templates, *found.long_templates)
    print_table([["  " + t.name, t.difficulty, f"at most {t.max_turns} turns"] for t in shown])


def app_facts(app: TaskApp) -> JsonObject:
    return {
        "app": app.key,
        "title": app.title,
        "description": app.description,
        "version": app.version,
        "tools": [one["function"] for one in app.openai_tools()],
        "templates": [_template_facts(one) for one in app.templates],
        "long_templates": [_template_facts(one) for one in app.long_templates],
    }


def _template_facts(template: TaskTemplate) -> JsonObject:
    return {"name": template.name, "difficulty": template.difficulty, "max_turns": template.max_turns}


@platform.command("openenv-package")
@click.argument("name", metavar="APP")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), metavar="DIR")
@json_option
def openenv_package(name: str, folder: Path, as_json: bool) -> None:
    """Write an app as an OpenEnv package: openenv.yaml, a client, a server, a Dockerfile. DIR is new or empty."""
    from palestra.environments.platform import PlatformError, app_of
    from palestra.environments.platform.api.openenv.package import write_package

    with one_line_errors(PlatformError, OSError), naming(folder):
        written = write_package(app_of(name), folder)
    print_result(
        as_json,
        {"app": name, "files": [str(file) for file in written]},
        f"wrote {len(written)} files to {folder}; to check them: openenv validate {folder} --level static",
    )


# Tasks


def choice_options(count: int) -> Callable[[F], F]:
    def added(command: F) -> F:
        for option in (
            click.option(
                "--count",
                type=click.IntRange(1),
                default=count,
                show_default=True,
                help="Number of tasks of each template.",
            ),
            click.option(
                "--first", type=click.IntRange(0), default=0, help="Number of the first task within the split."
            ),
            click.option(
                "--split",
                type=click.Choice(SPLITS),
                default="train",
                show_default=True,
                help="Split of the tasks; each has its own range of numbers.",
            ),
            click.option(
                "--difficulty",
                "difficulties",
                multiple=True,
                metavar="LEVEL",
                help="Difficulty: 0a to 0d, or 0 to 3; 4 to 6 for tasks of 10, 20 and 50 calls.",
            ),
            click.option(
                "--noise", is_flag=True, help="Add sentences to the prompt that have nothing to do with the task."
            ),
            click.option("--hint", is_flag=True, help="Name the tools of the solution in the prompt."),
            click.option(
                "--template",
                "templates",
                multiple=True,
                metavar="NAME",
                help="Only this template; may be repeated.  [all]",
            ),
            click.option("--app", "names", multiple=True, metavar="APP", help="Only this app; may be repeated.  [all]"),
        ):
            command = option(command)
        return command

    return added


@platform.group()
def task() -> None:
    """List tasks, show one, or write them to a file for Fleet."""


@task.command("list")
@choice_options(LISTED)
@json_option
def list_(as_json: bool, **choice: Any) -> None:
    """List tasks: the same numbers give the same tasks everywhere."""
    from palestra.environments.platform import PlatformError, make_task

    with one_line_errors(PlatformError):
        found = [make_task(key) for key in chosen_keys(**choice)]
    if as_json:
        print_json([task_facts(task) for task in found])
    else:
        print_table([[str(task.key), safe_text(task.prompt, keep="")] for task in found])


@task.command()
@click.argument("key")
@click.option("--solution", is_flag=True, help="Also print the tool calls of the task's own solution.")
@json_option
def show(key: str, solution: bool, as_json: bool) -> None:
    """Show a task by its key, such as keys-put_number-0b-17."""
    from palestra.environments.platform import PlatformError, make_task

    with one_line_errors(PlatformError):
        task = make_task(key)
        facts = task_facts(task) | ({"solution": solution_of(task)} if solution else {})
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        if name != "solution":
            click.echo(f"{name:<12}{safe_text(str(value), keep='')}")
    for call in facts.get("solution", ()):
        click.echo(f"{'call':<12}{safe_text(call, keep='')}")


@task.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@choice_options(EXPORTED)
@json_option
def export(file: Path, as_json: bool, **choice: Any) -> None:
    """Write a tasks_file that Fleet reads; each task has a verifier that runs without Palestra."""
    from palestra.environments.fleet.platform_tasks import export_tasks
    from palestra.environments.platform import PlatformError

    with one_line_errors(PlatformError, OSError), naming(file):
        count = export_tasks(chosen_keys(**choice), file)
    print_result(as_json, {"file": str(file), "tasks": count}, f"{count} tasks in {file}")


@task.command()
@choice_options(MEASURED)
@click.option(
    "--skill",
    "skills",
    type=click.FloatRange(0, 1),
    multiple=True,
    default=(0.9, 0.98),
    show_default=True,
    help="Share of the player's calls that are right; may be repeated.",
)
@json_option
def measure(as_json: bool, skills: tuple[float, ...], **choice: Any) -> None:
    """Measure how difficult tasks are: how long their solutions are, and how often a scripted player of a given skill
    solves them."""
    from palestra.environments.platform import PlatformError
    from palestra.environments.platform.skilled_player import measure_templates

    with one_line_errors(PlatformError):
        rows = measure_templates(chosen_keys(**choice), skills)
    if as_json:
        print_json(rows)
        return
    head = ["template", "calls", "writes", *(f"success at {skill:g}" for skill in skills)]
    lines = [
        [one["template"], f"{one['calls']:g}", f"{one['writes']:g}", *(f"{of['success']:.3f}" for of in one["skills"])]
        for one in rows
    ]
    print_table([head, *lines])


def chosen_keys(
    names: tuple[str, ...],
    templates: tuple[str, ...],
    difficulties: tuple[str, ...],
    split: str,
    first: int,
    count: int,
    hint: bool,
    noise: bool,
) -> list[TaskKey]:
    from palestra.environments.platform import TaskKey
    from palestra.environments.platform.catalog import chosen_templates
    from palestra.environments.platform.task_records import FIRST_EVAL, DifficultyKnob

    knobs = tuple(knob for knob, is_on in ((DifficultyKnob.HINT, hint), (DifficultyKnob.NOISE, noise)) if is_on)
    start = first + (FIRST_EVAL if split == "eval" else 0)
    if split == "train" and start + count > FIRST_EVAL:
        raise fail(f"tasks of the split train have numbers below {FIRST_EVAL}", USAGE)
    found = chosen_templates(names, templates, difficulties)
    if not found:
        raise fail("no template matches; to see them: palestra platform app show APP", NOT_FOUND)
    return [TaskKey(a.key, t.name, t.difficulty, n, knobs) for a, t in found for n in range(start, start + count)]


def task_facts(task: PlatformTask) -> JsonObject:
    return {
        "key": str(task.key),
        "prompt": task.prompt,
        "app": task.app.key,
        "data": task.seed.key,
        "split": task.key.split,
        "max_turns": task.template.max_turns,
        "today": task.variables["CURRENT_DATE"],
        "user": task.variables["LOGGED_IN_NAME"],
    }


def solution_of(task: PlatformTask) -> list[str]:
    import msgspec

    from palestra.environments.platform import Instance
    from palestra.environments.platform.golden import play_golden

    played = play_golden(task, Instance(task.seed, variables=task.variables))
    calls = [f"{call.tool} {msgspec.json.encode(call.arguments).decode()}" for call, _ in played.steps]
    return calls if played.answer is None else [*calls, f"done {played.answer}"]


@platform.command()
@click.argument("key", metavar="KEY_OR_APP")
@json_option
def play(key: str, as_json: bool) -> None:
    """Play a task by hand: call tools (put value=3), then type done. Lines may also come from a pipe."""
    from palestra.cli.platform.play import play_task
    from palestra.environments.platform import PlatformError

    with one_line_errors(PlatformError):
        play_task(key, as_json=as_json)
