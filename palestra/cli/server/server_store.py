"""The store of a server, for commands that work beside it: options that say where it is, and opening it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import rich_click as click

from palestra.cli.output import USAGE, fail, needs_extra, one_line_errors
from palestra.cli.run.common import json_option

if TYPE_CHECKING:
    from palestra.store import Store

F = TypeVar("F", bound=Callable[..., Any])


def store_options(command: F) -> F:
    """Options that say where the server's store is and in which form to print."""
    for option in (
        json_option,
        click.option("-c", "--config", "files", multiple=True, metavar="FILE", help="The server's config."),
        click.option("--database", metavar="URL", help="The server's database. [SQLite in the state folder]"),
        click.option("--state", metavar="DIR", help="The server's state folder.  [.palestra]"),
    ):
        command = option(command)
    return command


@contextmanager
def open_store(
    files: tuple[str, ...], state: str | None, database: str | None, *, create: bool = False
) -> Iterator[Store]:
    from palestra.config import ConfigError, Override, load_config
    from palestra.config.serve import ServeConfig

    flags = {"state": state, "database": database}
    given = [Override(name, value, f"--{name}") for name, value in flags.items() if value is not None]
    with one_line_errors(ConfigError):
        config = load_config(ServeConfig, files, given)
    file = config.database_file
    if not create and file is not None and not file.is_file():
        raise fail(f"there is no database {file}; name the server's with --state DIR, --database URL or -c FILE", USAGE)
    with needs_extra("server"):
        from palestra.store import Store, StoreError
    with one_line_errors(StoreError), needs_extra("postgres"), Store.open(config.database, lock=False) as store:
        yield store
