"""`palestra key`: who may use a server. Works beside a running server, which notices changes within seconds.

Owns: arguments and printing. Never touches: how keys are made and kept; the store does.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import rich_click as click

from palestra.cli.output import NOT_FOUND, USAGE, fail, needs_extra, one_line_errors, print_json, print_result
from palestra.cli.run.common import json_option, print_table
from palestra.util.json_types import JsonObject

if TYPE_CHECKING:
    from palestra.store import Store
    from palestra.store.records import Key

F = TypeVar("F", bound=Callable[..., Any])

RIGHTS = ["admin", "trainer", "worker", "episode", "metrics", "replica"]
FIRST = (
    "this is the first key: from now on, also a server on a loopback address needs a valid key from "
    "everyone and answers 401 without one; running servers notice within 2 seconds"
)
BEFORE = "models made without keys belong to 'local'; for a key that sees them: palestra key create --owner local"


def common_options(command: F) -> F:
    """Options that say where the server's store is and in which form to print."""
    for option in (
        json_option,
        click.option("-c", "--config", "files", multiple=True, metavar="FILE", help="The server's config."),
        click.option("--database", metavar="URL", help="The server's database. [SQLite in the state folder]"),
        click.option("--state", metavar="DIR", help="The server's state folder.  [.palestra]"),
    ):
        command = option(command)
    return command


@click.group()
def key() -> None:
    """Make, list and revoke API keys."""


@key.command()
@click.option("--name", help="Name of the key, unique among the keys in use. [generated]")
@click.option(
    "--owner",
    help="Keys of one owner see the same models and checkpoints; 'local' owns those made before there were "
    "keys. [the key's name]",
)
@click.option("--right", type=click.Choice(RIGHTS), default="trainer", show_default=True, help="What the key allows.")
@common_options
def create(name: str | None, owner: str | None, right: str, as_json: bool, **where: Any) -> None:
    """Make a key and show it; it cannot be shown again."""
    name = name or f"key-{secrets.token_hex(3)}"
    with open_store(**where, create=True) as store:
        from palestra.store.keys import create_key, list_keys
        from palestra.store.records import Rights

        made = store.write_now(
            lambda conn: create_key(conn, name=name, owner=owner or name, rights=Rights(right), now=time.time())
        )
        is_first = len(store.read_now(lambda conn: list_keys(conn, revoked=True))) == 1
    if as_json:
        print_json({"key": made.text, **key_json(made.key), **({"note": FIRST} if is_first else {})})
        return
    click.echo(made.text)
    click.echo(f"key {made.key.key_id} {name!r} of {made.key.owner!r} with the right {right!r}", err=True)
    click.echo("keep it now: only its hash is stored. To use it: export TINKER_API_KEY=tml-…", err=True)
    if is_first:
        click.echo(FIRST, err=True)
        click.echo(BEFORE, err=True)


@key.command("list")
@click.option("--all", "revoked", is_flag=True, help="Also list revoked keys.")
@common_options
def list_(revoked: bool, as_json: bool, **where: Any) -> None:
    """List the keys in use."""
    with open_store(**where) as store:
        from palestra.store.keys import list_keys

        known = store.read_now(lambda conn: list_keys(conn, revoked=True))
    keys = [one for one in known if revoked or one.revoked_at is None]
    if as_json:
        print_json([key_json(one) for one in keys])
        return
    if not keys:
        what = "all keys are revoked, so nobody can use the server" if known else "no keys"
        click.echo(f"{what}; to make one: palestra key create")
        return
    columns = ("id", "name", "owner", "right", "created_at", "last_used_at", *(["revoked_at"] if revoked else []))
    rows = [[column.removesuffix("_at").replace("_", " ") for column in columns]]
    rows += [[str(shown[column] or "") for column in columns] for shown in map(key_json, keys)]
    print_table(rows)


@key.command()
@click.argument("which", metavar="ID_OR_NAME")
@common_options
def revoke(which: str, as_json: bool, **where: Any) -> None:
    """Revoke a key for ever."""
    with open_store(**where) as store:
        from palestra.store.keys import revoke_key

        meanings = [int(which), which] if which.isdecimal() else [which]
        found = (store.write_now(lambda conn, one=one: revoke_key(conn, one, now=time.time())) for one in meanings)
        gone = next((one for one in found if one is not None), None)
    if gone is None:
        raise fail(f"no key in use is called {which!r}; to see them: palestra key list", NOT_FOUND)
    print_result(as_json, key_json(gone), f"key {gone.key_id} {gone.name!r} of {gone.owner!r} is revoked")


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


def key_json(one: Key) -> JsonObject:
    return {
        "id": one.key_id,
        "name": one.name,
        "owner": one.owner,
        "right": str(one.rights),
        "created_at": _time_text(one.created_at),
        "revoked_at": _time_text(one.revoked_at),
        "last_used_at": _time_text(one.last_used_at),
    }


def _time_text(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
