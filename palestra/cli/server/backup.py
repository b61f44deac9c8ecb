"""`palestra backup` and `palestra restore`: a stopped server's database and state folder in one file, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import rich_click as click

from palestra import __version__
from palestra.cli.output import needs_extra, one_line_errors
from palestra.util.amounts import bytes_text

if TYPE_CHECKING:
    from palestra.config.serve import ServeConfig

F = TypeVar("F", bound=Callable[..., Any])


def server_options(command: F) -> F:
    """Options that say where the server's state is."""
    for option in (
        click.option("-c", "--config", "files", multiple=True, metavar="FILE", help="The server's config."),
        click.option("--database", metavar="URL", help="The server's database. [SQLite in the state folder]"),
        click.option("--state", metavar="DIR", help="The server's state folder.  [.palestra]"),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@server_options
def backup(file: Path, **where: Any) -> None:
    """Write a stopped server's database and state folder to FILE, a tar archive.

    It has keys, models in training, checkpoints, traces and episodes. What is in object storage is not in it; nor is a
    folder of checkpoints outside of the state folder.
    """
    config = server_config(**where)
    with needs_extra("server"):
        from palestra.store.backup import back_up
        from palestra.store.errors import StoreError
    with one_line_errors(StoreError, OSError), needs_extra("postgres"):
        size = back_up(config.database, config.state, file.absolute(), version=__version__)
    click.echo(f"{file} has {bytes_text(size)}")
    checkpoints = config.checkpoints
    if not isinstance(checkpoints, Path) or not checkpoints.is_relative_to(config.state):
        click.echo(f"warning: the checkpoints in {checkpoints} are not in it; keep them as well", err=True)


@click.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@server_options
def restore(file: Path, **where: Any) -> None:
    """Restore a backup from FILE into a new state folder and an empty database.

    The version of Palestra may be newer than the one that made the backup: its server migrates the state when it
    starts.
    """
    config = server_config(**where)
    with needs_extra("server"):
        from palestra.store import backup as backups
        from palestra.store.errors import StoreError
    with one_line_errors(StoreError, OSError), needs_extra("postgres"):
        about = backups.restore(file.absolute(), config.database, config.state)
    click.echo(f"restored what version {about.version} had into {config.state}; start the server with --state")


def server_config(files: tuple[str, ...], state: str | None, database: str | None) -> ServeConfig:
    from palestra.config import ConfigError, Override, load_config
    from palestra.config.serve import ServeConfig

    flags = {"state": state, "database": database}
    given = [Override(name, value, f"--{name}") for name, value in flags.items() if value is not None]
    with one_line_errors(ConfigError):
        return load_config(ServeConfig, files, given)
