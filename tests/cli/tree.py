"""Every command there is, found by walking the click tree as `palestra` has it."""

from __future__ import annotations

from collections.abc import Iterator

import rich_click as click
from click.testing import CliRunner, Result

from palestra.cli import main
from palestra.cli.lazy import LazyCommand

Path = tuple[str, ...]


def walk(command: click.Command = main, path: Path = ()) -> Iterator[tuple[Path, click.Command]]:
    """Groups before what is in them; hidden commands are left out."""
    if isinstance(command, LazyCommand):
        command = command.load()
    yield path, command
    if isinstance(command, click.Group):
        for name, one in sorted(command.commands.items()):
            if not one.hidden:
                yield from walk(one, (*path, name))


TREE: dict[Path, click.Command] = dict(walk())
COMMANDS = {path: command for path, command in TREE.items() if not isinstance(command, click.Group)}
GROUPS = {path: command for path, command in TREE.items() if path and isinstance(command, click.Group)}


def options(command: click.Command) -> dict[str, click.Option]:
    """Those in its help, by each of their long names."""
    shown = (param for param in command.params if isinstance(param, click.Option) and not param.hidden)
    return {name: one for one in shown for name in one.opts if name.startswith("--")}


def palestra(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], prog_name="palestra")
