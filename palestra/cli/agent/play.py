"""`palestra agent play` and `list`: command-line agents that play the episodes of a training run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from palestra.cli.episode.commands import player_options, print_progress, server_and_key
from palestra.cli.output import NOT_FOUND, fail, one_line_errors, print_json

if TYPE_CHECKING:
    from palestra.config.agents import AgentConfig
    from palestra.episodes import PlayCounts

KEPT = Path("agent-episodes")


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def list_(as_json: bool) -> None:
    """List the agents that are known by name, and whether each is installed where a sandbox can show it."""
    from palestra.agents import AGENTS, UnknownAgentProgram
    from palestra.agents.installation import find_installation

    found: list[dict[str, str | None]] = []
    for name, one in AGENTS.items():
        try:
            installed = find_installation(one.program)
            program, problem = installed.program, installed.hidden_by()
        except UnknownAgentProgram as error:
            program, problem = None, str(error)
        found.append({"name": name, "program": program, "problem": problem})
    if as_json:
        print_json(found)
        return
    for one in found:
        click.echo(f"{one['name']:<8}  {'no: ' + one['problem'] if one['problem'] else 'yes'}")


class WorthType(click.ParamType[Any]):
    """`grade`, `mask` or a reward."""

    name = "grade|mask|NUMBER"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | float:
        if value in ("grade", "mask"):
            return value
        try:
            return float(value)
        except ValueError:
            self.fail(f"should be grade, mask or a number, is {value!r}", param, ctx)


@click.command()
@click.argument("command", nargs=-1, required=True, metavar="AGENT|COMMAND…")
@click.option(
    "--tasks",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="A folder of task folders. [those that come with Palestra]",
)
@click.option("--run", required=True, metavar="RUN", help="The run whose episodes are played.")
@click.option("--concurrency", type=click.IntRange(1), default=4, show_default=True, help="Number of agents at a time.")
@click.option("--sandbox", default="local", show_default=True, help="Backend of the sandboxes.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Time limit of an agent. [the task's]",
)
@click.option(
    "--visible", multiple=True, metavar="FOLDER", help="Folder of this machine to show to agents; may be repeated."
)
@click.option("--on-timeout", type=WorthType(), default="grade", show_default=True, help="Worth of a late agent.")
@click.option("--on-crash", type=WorthType(), default="grade", show_default=True, help="Worth of a failed agent.")
@click.option("--on-refusal", type=WorthType(), default=0.0, show_default=True, help="Worth of using no tool.")
@click.option("--on-empty-patch", type=WorthType(), default=0.0, show_default=True, help="Worth of changing nothing.")
@click.option("--keep", type=click.Path(path_type=Path), metavar="FOLDER", help=f"Where records are kept. [{KEPT}/RUN]")
@player_options
@server_and_key
def play(
    tasks: Path | None,
    run: str,
    keep: Path | None,
    server: str,
    key: str | None,
    kind: str | None,
    max_episodes: int | None,
    idle_s: float | None,
    run_wait_s: float,
    **given: Any,
) -> None:
    """Play the coding tasks of a training run with an agent, each in a sandbox, until Ctrl-C.

    AGENT is claude, codex, opencode, qwen, mini or shell, with further arguments for it; or a COMMAND, which finds its
    task in $PROMPT, the model in $MODEL, and address and key in $OPENAI_BASE_URL, $OPENAI_API_KEY, $ANTHROPIC_BASE_URL
    and $ANTHROPIC_API_KEY. Words that begin with - follow after --.
    """
    from palestra.coding import TaskError
    from palestra.coding.shipped_tasks import SHIPPED
    from palestra.config.agents import AgentConfig
    from palestra.episodes import EpisodeClientError, NotPlayedHere
    from palestra.sandbox import SandboxError

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    pool = {"run": run, "kind": kind, "max_episodes": max_episodes, "idle_s": idle_s, "run_wait_s": run_wait_s}
    with one_line_errors(EpisodeClientError, TaskError, SandboxError, LookupError, ValueError):
        config = AgentConfig(**given)
        try:
            counts = _play(config, tasks or SHIPPED, keep or KEPT / run, server, key, pool)
        except NotPlayedHere as error:
            raise fail(f"{error}; name the folder that the run was given (--tasks)", NOT_FOUND) from error
    click.echo(f"{counts}; stopped ({counts.reason})")


def _play(
    config: AgentConfig, tasks: Path, keep: Path, server: str, key: str | None, pool: dict[str, Any]
) -> PlayCounts:
    from palestra.agents import AgentPlayer
    from palestra.coding import read_tasks
    from palestra.episodes import EpisodeClient
    from palestra.episodes import play as play_episodes

    found = {task.id: task for task in read_tasks(tasks)}
    with EpisodeClient(server, key) as client:
        player = AgentPlayer(config, found, keep, client.inner)
        click.echo(f"{' '.join(config.command)} plays {len(found)} tasks for {server}; records are kept in {keep}")
        return play_episodes(
            client, player, stops_at_unplayed=True, on_progress=print_progress, concurrency=config.concurrency, **pool
        )
