"""A click group that imports a command only when it runs, and accepts aliases of its commands."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import rich_click as click

from palestra.cli.options import warn_of_old_name
from palestra.cli.output import INTERRUPTED, file_errors


class LazyCommand(click.RichCommand):
    """Enough of a command for the list in `--help`, so that showing it imports none of them."""

    def __init__(self, name: str, where: str, summary: str) -> None:
        super().__init__(name=name, help=summary)
        self.where = where

    def load(self) -> click.Command:
        module, attribute = self.where.split(":")
        return getattr(importlib.import_module(module), attribute)


class LazyGroup(click.RichGroup):
    """A group of lazily imported commands. `aliases` are other names of its commands, not shown in the help;
    `old_names` are aliases that will be removed; what they stand for may be several words."""

    def __init__(
        self,
        *args: Any,
        lazy: Sequence[LazyCommand] = (),
        aliases: Mapping[str, str] | None = None,
        old_names: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._aliases, self._old_names = dict(aliases or {}), dict(old_names or {})
        for command in lazy:
            self.add_command(command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        typed = args[0]
        if new := self._old_names.get(typed):
            warn_of_old_name(f"`{ctx.command_path} {typed}`", f"`{ctx.command_path} {new}`")
        known = new or self._aliases.get(typed, typed)
        name, command, rest = super().resolve_command(ctx, [*known.split(), *args[1:]])
        return name, command.load() if isinstance(command, LazyCommand) else command, rest

    def invoke(self, ctx: click.Context) -> object:
        try:
            with file_errors():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None
