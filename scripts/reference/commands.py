"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import rich_click as click

from palestra.cli.app import main
from palestra.cli.lazy import LazyCommand
from scripts.reference.pages import Reference, code, page, table

INTRO = """Made from the code; `palestra COMMAND --help` prints the same. What all commands share, and their exit
codes, are in [Commands](../commands.md)."""


def pages(reference: Reference) -> None:
    parts = [_section(command, context, reference) for command, context in _walk(main, None)]
    reference.pages["reference/commands.md"] = page("Every command and option", INTRO, parts)


def _walk(command: click.Command, parent: click.Context | None) -> Iterator[tuple[click.Command, click.Context]]:
    command = command.load() if isinstance(command, LazyCommand) else command
    if command.hidden:
        return
    context = click.Context(command, info_name="palestra" if parent is None else command.name, parent=parent)
    yield command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None:
                yield from _walk(inner, context)


def _section(command: click.Command, context: click.Context, reference: Reference) -> str:
    path = context.command_path
    depth = "#" * min(4, 1 + len(path.split()))
    about = reference.explained(command.help, f"the command `{path}`", "the docstring of its function")
    arguments = command.collect_usage_pieces(context)
    usage = " ".join([path, *arguments])
    about = reference.public("command", path, " ".join(arguments), about)
    options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden and one.name != "help"]
    rows = [_row(option, context, path, reference) for option in options]
    listed = table(["option", "value", "default", "what it does"], rows) if rows else ""
    return "\n\n".join(part for part in (f"{depth} {path}", about, f"```text\n{usage}\n```", listed) if part)


def _row(option: click.Option, context: click.Context, path: str, reference: Reference) -> list[str]:
    names = [*option.opts, *option.secondary_opts]
    what = f"the option `{names[0]}` of `{path}`"
    about = reference.explained(option.help, what, "its `help`")
    value = "" if option.is_flag else option.make_metavar(ctx=context)
    meaning = " ".join(part for part in (*names[1:], value, _default(option)) if part)
    about = reference.public("command", f"{path} {names[0]}", meaning, about)
    return [", ".join(map(code, names)), code(value), code(_default(option)), about]


def _default(option: click.Option) -> str:
    value: Any = option.default
    is_said = isinstance(value, str | int | float) and not isinstance(value, bool) and str(value) != ""
    return str(value) if is_said else ""
