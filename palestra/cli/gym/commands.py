"""`palestra gym`: start the servers of a gym, show their state, show a resolved config."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import rich_click as click

from palestra.cli.lazy import LazyCommand, LazyGroup
from palestra.cli.options import server_options
from palestra.cli.output import UNREACHABLE, fail, needs_extra, one_line_errors, print_json
from palestra.cli.run.common import json_option, print_table
from palestra.types.gym import GYM_HEAD
from palestra.util.json_types import JsonObject
from palestra.util.safe_text import safe_text

if TYPE_CHECKING:
    from palestra.gym.config import GymSources
    from palestra.gym.supervisor import Supervisor

F = TypeVar("F", bound=Callable[..., Any])

STATUS_S = 5.0
HEAD = GYM_HEAD
COMMANDS = [
    LazyCommand(
        "aggregate", "palestra.cli.gym.results:aggregate", "Compute metrics over the rollouts of several files."
    ),
    LazyCommand("collect", "palestra.cli.gym.collect:collect", "Play the rows of a file through a gym's agents."),
    LazyCommand("compare", "palestra.cli.gym.results:compare", "Compare two collections: what got better or worse."),
    LazyCommand("datasets", "palestra.cli.gym.results:datasets", "Check and join the datasets that configs name."),
    LazyCommand("list", "palestra.cli.gym.new:list_", "List the servers, environments and benchmarks that can be run."),
    LazyCommand("new", "palestra.cli.gym.new:new", "Make a resources server: code, config, rows, tests."),
    LazyCommand("profile", "palestra.cli.gym.results:profile", "Show how hard each task of a collection is."),
    LazyCommand("reverify", "palestra.cli.gym.results:reverify", "Grade stored rollouts again, without a model."),
    LazyCommand("test", "palestra.cli.gym.new:test", "Run the tests of a server's folder."),
]


@click.group(cls=LazyGroup, lazy=COMMANDS)
def gym() -> None:
    """Run model, agent and resources servers, and collect rollouts with them. Reads NeMo Gym's configs."""


def head_options(*, default: str | None = HEAD, hint: str = "") -> Callable[[F], F]:
    """Adds the options that say which gym is meant; they arrive as `server` and `key`."""
    about = f"Address of the head server of a running gym.{hint}"
    return server_options(help=about, default=default, envvar=None, key_envvar="PALESTRA_GYM_KEY", old="--head")


def search_dir_option(help: str) -> Callable[[F], F]:  # noqa: A002
    """Adds the option for the folders to search first; it arrives as `roots`."""
    folder = click.Path(path_type=Path, file_okay=False, exists=True)
    return click.option(
        "--search-dir", "roots", multiple=True, type=folder, help=f"{help}; may be repeated. [NEMO_GYM_EXTRA_ROOTS]"
    )


def source_options(command: F) -> F:
    """Adds the options that say where a gym's config comes from; `sources(**kwargs)` takes them."""
    options = [
        click.option(
            *("-c", "--config", "files"),
            multiple=True,
            metavar="FILE",
            help="YAML file below the current folder or a search dir; may be repeated, later files win.",
        ),
        search_dir_option("Look for configs and server folders here first"),
        click.option("-m", "--model", metavar="NAME", help="Name of the policy model: policy_model_name."),
        click.option("--model-url", metavar="URL", help="Address at which it is served: policy_base_url."),
        click.option(
            "--model-api-key", metavar="KEY", envvar="PALESTRA_POLICY_KEY", show_envvar=True, help="policy_api_key."
        ),
        click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]..."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def sources(
    files: tuple[str, ...],
    roots: tuple[Path, ...],
    overrides: tuple[str, ...],
    model: str | None = None,
    model_url: str | None = None,
    model_api_key: str | None = None,
) -> GymSources:
    with needs_extra("gym"):
        from palestra.gym.config import GymSources
    flags = {"policy_model_name": model, "policy_base_url": model_url, "policy_api_key": model_api_key}
    policy = {key: value for key, value in flags.items() if value is not None}
    return GymSources(files=files, roots=roots, overrides=overrides, initial=policy)


@gym.command()
@click.option(
    "--with-parent", is_flag=True, hidden=True, help="Stop when stdin closes; for processes that start this command."
)
@source_options
def run(with_parent: bool, **given: Any) -> None:
    """Start every server of a config and keep them running. Ctrl-C stops them.

    KEY=VALUE changes a setting, +KEY=VALUE adds one, ~KEY removes one; KEY is dotted, as in
    mcqa.resources_servers.mcqa.port=9001.
    """
    with needs_extra("gym"):
        import uvicorn  # noqa: F401

        from palestra.gym.config import ReservedPorts, load_gym
        from palestra.gym.errors import GymError
        from palestra.gym.supervisor import Supervisor
    with one_line_errors(GymError), ReservedPorts() as ports:
        config = load_gym(sources(**given), ports=ports, report=say)
        if config.settings["dry_run"]:
            asyncio.run(until_stopped(build_all(Supervisor(config, ports, say))))
        else:
            asyncio.run(until_stopped(keep(Supervisor(config, ports, say)), with_parent=with_parent))
    say("The gym has stopped.")


def say(line: str) -> None:
    """Prints on stderr, since stdout is for results. A reader that has gone away is no error."""
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except OSError:
        pass


async def until_stopped(work: Coroutine[Any, Any, None], *, with_parent: bool = False) -> None:
    """Runs until SIGINT or SIGTERM, then stops in order, which takes seconds; a second signal does not hurry it. With
    `with_parent`, the end of stdin stops it too."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    if with_parent:
        stdin = sys.stdin.fileno()
        # readable means closed, and stays so
        loop.add_reader(stdin, lambda: (loop.remove_reader(stdin), stopped.set()))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stopped.set)
    waiting = asyncio.create_task(stopped.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not task.done():
        say("Stopping the servers.")
        task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        pass


async def keep(supervisor: Supervisor) -> None:
    async with supervisor as running:
        say(f"The head is at {running.head_url}; starting {len(running.config.servers)} servers.")
        if running.made_key is not None:
            say(f"admin key (shown this once): {running.made_key}")
        await running.ready()
        for one in running.instances():
            say(f"  {one['process_name']} ({one['server_type']}/{one['name']}) at {one['url']}")
        with suppress(OSError):  # as in `say`
            click.echo(f"The gym is ready at {running.head_url}")
        await running.run()


async def build_all(supervisor: Supervisor) -> None:
    """Builds the environments of the servers one after another and starts nothing (`dry_run=true`)."""
    await supervisor.build()
    say("dry_run: everything is ready to start")


@gym.command()
@source_options
def resolve(**given: Any) -> None:
    """Show the merged config with all values filled in; keys and passwords are blacked out."""
    with needs_extra("gym"):
        from palestra.gym.config import load_gym, shown
        from palestra.gym.errors import GymError
    with one_line_errors(GymError):
        config = load_gym(sources(**given), is_code_needed=False, report=say)
    click.echo(shown(config.settings), nl=False)


@gym.command()
@head_options()
@json_option
def status(server: str, key: str | None, as_json: bool) -> None:
    """Show the servers of a running gym and their state."""
    instances = read_instances(server, key)
    if as_json:
        print_json(instances)
        return
    rows = [
        [safe_text(str(one.get(key))) for key in ("process_name", "server_type", "name", "url", "pid")]
        + [safe_text(str(one.get("state") or one.get("status"))), uptime_text(one), str(one.get("restarts", ""))]
        for one in instances
    ]
    print_table([["server", "kind", "implementation", "url", "pid", "state", "up", "restarts"], *rows])


def read_instances(head: str, key: str | None) -> list[JsonObject]:
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{head.rstrip('/')}/server_instances", headers=headers, timeout=STATUS_S)
        found = answer.raise_for_status().json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        message = f"no gym answers at {head} ({error}); to start one: palestra gym run -c FILE"
        raise fail(message, UNREACHABLE) from None
    if not isinstance(found, list):
        raise fail(f"the server at {head} is not the head server of a gym", UNREACHABLE)
    return found


def uptime_text(instance: JsonObject) -> str:
    seconds = int(instance.get("uptime_seconds") or 0)
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
