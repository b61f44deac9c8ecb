"""A click group that imports a command only when it runs.

Owns: standing in for commands that are not loaded yet. Never touches: what the commands do.
"""

from __future__ import annotations

import importlib
from typing import Any

import rich_click as click


class LazyCommand(click.RichCommand):
    """Enough of a command for the list in `--help`, so that showing it imports none of them."""

    def __init__(self, name: str, where: str, summary: str) -> None:
        super().__init__(name=name, help=summary)
        self.where = where

    def load(self) -> click.Command:
        module, attribute = self.where.split(":")
        return getattr(importlib.import_module(module), attribute)


class LazyGroup(click.RichGroup):
    def __init__(self, *args: Any, lazy: list[LazyCommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for command in lazy:
            self.add_command(command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, LazyCommand) else command, rest
