"""`palestra gym list`, `new` and `test`: which servers there are, make one, run its tests.

Owns: arguments and printing. Never touches: what a server is.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import msgspec
import rich_click as click

from palestra.cli.gym.commands import search_dir_option
from palestra.cli.output import FAILED, NOT_FOUND, fail, needs_extra, one_line_errors, print_json
from palestra.cli.run.common import json_option, print_table
from palestra.util.files import naming


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
        from palestra.gym.scaffolding import check_folder
    with one_line_errors(GymError, OSError):
        folder = find_folder(name, roots)
        for line in check_folder(folder):
            click.echo(line)
        if not (folder / "tests").is_dir():
            click.echo("this server has no tests")
            return
        command, environment = pytest_command(folder)
    code = subprocess.run([*command, *pytest_args], cwd=folder, env=environment, check=False).returncode
    raise SystemExit(FAILED if code else 0)  # pytest's own exit codes have other meanings than ours


def find_folder(name: str, roots: tuple[Path, ...]) -> Path:
    from palestra.gym.records import ServerKind
    from palestra.gym.registry import implementations
    from palestra.gym.search_folders import did_you_mean, search_roots

    searched = search_roots(roots)
    kinds = [kind for kind in ServerKind if name.startswith(f"{kind}/")] or list(ServerKind)
    plain = name.rpartition("/")[2]
    for root in searched:
        for kind in kinds:
            if any((root / kind / plain).glob("*.py")):
                return root / kind / plain
    known = {one for kind in kinds for one in implementations(kind, searched)}
    places = "".join(f"\n  not below {root}" for root in searched)
    raise fail(f"there is no server {name!r}{places}{did_you_mean(plain, known)}", NOT_FOUND)


def pytest_command(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The command that runs pytest with the interpreter of the server."""
    from palestra.gym.nemo_gym_compat import stock_path
    from palestra.gym.registry import is_stock
    from palestra.gym.venvs import interpreter_for

    interpreter = asyncio.run(interpreter_for(folder, {}, lambda line: click.echo(line, err=True)))
    environment = dict(os.environ)
    if any(is_stock(file) for file in folder.glob("*.py")):
        environment["PYTHONPATH"] = stock_path(folder)
    return [interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"], environment


KINDS = ["resources-servers", "agents", "models", "environments", "benchmarks"]


@click.command("list")
@click.argument("kind", type=click.Choice(KINDS), required=False)
@click.option("--matching", metavar="TEXT", help="Only entries whose name contains this text.")
@search_dir_option("Look here first")
@json_option
def list_(kind: str | None, matching: str | None, roots: tuple[Path, ...], as_json: bool) -> None:
    """Servers, environments and benchmarks that can be run, with their configs."""
    with needs_extra("gym"):
        from palestra.gym.catalog import CatalogKind, catalog
        from palestra.gym.search_folders import search_roots
    kinds = [CatalogKind(one) for one in ([kind] if kind else KINDS)]
    entries = [one for one in catalog(kinds, search_roots(roots)) if (matching or "").lower() in one.name.lower()]
    if as_json:
        print_json(msgspec.to_builtins(entries))
        return
    rows = [[one.kind, one.name, config] for one in entries for config in one.configs or ["-"]]
    print_table([["kind", "name", "config"], *rows])
