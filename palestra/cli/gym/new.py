"""`palestra gym list`, `new` and `test`: which servers there are, make one, run its tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import rich_click as click

from palestra.cli.gym.commands import search_dir_option
from palestra.cli.output import FAILED, needs_extra, one_line_errors, print_json
from palestra.cli.run.common import json_option, print_table
from palestra.util.atomic_files import naming


@click.command()
@click.argument("name")
@click.option("--agent", is_flag=True, help="Make an agent, in responses_api_agents/NAME.")
@click.option(
    "--below",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    show_default="the current folder",
    metavar="DIR",
    help="Folder in which resources_servers/NAME or responses_api_agents/NAME is made.",
)
def new(name: str, agent: bool, below: Path) -> None:
    """Make a resources server, or with --agent an agent: code, config, rows, tests that pass.

    A resources server also gets a config for training on it: train.yaml."""
    with needs_extra("gym"):
        from palestra.gym.errors import GymError
        from palestra.gym.records import ServerKind
        from palestra.gym.scaffolding import make_server
    kind = ServerKind.AGENT if agent else ServerKind.RESOURCES
    with one_line_errors(GymError, OSError), naming(below):
        files = make_server(name, below, kind)
    for file in files:
        click.echo(file)
    there = f"cd {below} && " if below != Path() else ""
    click.echo(f"to try it: {there}palestra gym test {kind}/{name}")
    if not agent:
        click.echo(f"to train on it, in minutes: {there}palestra train {kind}/{name}/train.yaml")


@click.command()
@click.argument("name")
@search_dir_option("Look for the server's folder here first")
@click.argument("pytest_args", nargs=-1, type=click.UNPROCESSED)
def test(name: str, roots: tuple[Path, ...], pytest_args: tuple[str, ...]) -> None:
    """Check that a server loads and its example rows can be begun, then run its own tests. NAME is a server, or
    KIND/SERVER.

    What comes after -- goes to pytest. For servers of NeMo Gym, Palestra provides the modules that they import from it.
    """
    with needs_extra("gym"):
        from palestra.gym.errors import GymError
        from palestra.gym.scaffolding import check_folder, find_folder, pytest_command
        from palestra.gym.search_folders import search_roots
    with one_line_errors(GymError, OSError):
        folder = find_folder(name, search_roots(roots))
        for line in check_folder(folder):
            click.echo(line)
        if not (folder / "tests").is_dir():
            click.echo("this server has no tests")
            return
        tests = pytest_command(folder, lambda line: click.echo(line, err=True))
    command = [*tests.command, *pytest_args]
    code = subprocess.run(command, cwd=folder, env=tests.environment, check=False).returncode
    raise SystemExit(FAILED if code else 0)  # pytest's own exit codes have other meanings than ours


KINDS = ["resources-servers", "agents", "models", "environments", "benchmarks"]


@click.command("list")
@click.argument("kind", type=click.Choice(KINDS), required=False)
@click.option("--matching", metavar="TEXT", help="Only entries whose name contains this text.")
@search_dir_option("Look here first")
@json_option
def list_(kind: str | None, matching: str | None, roots: tuple[Path, ...], as_json: bool) -> None:
    """Servers, environments and benchmarks that can be run, with their configs."""
    with needs_extra("gym"):
        from palestra.gym.search_folders import CatalogKind, catalog, search_roots
    kinds = [CatalogKind(one) for one in ([kind] if kind else KINDS)]
    entries = [one for one in catalog(kinds, search_roots(roots)) if (matching or "").lower() in one.name.lower()]
    if as_json:
        print_json(msgspec.to_builtins(entries))
        return
    rows = [[one.kind, one.name, config] for one in entries for config in one.configs or ["-"]]
    print_table([["kind", "name", "config"], *rows])
