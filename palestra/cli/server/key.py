"""`palestra key`: who may use a server, and until when. Works beside a running server, which soon notices changes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import rich_click as click

from palestra.cli.options import Duration
from palestra.cli.output import NOT_FOUND, fail, one_line_errors, print_json, print_result
from palestra.cli.run.common import print_table
from palestra.cli.server.quota import parse_limits
from palestra.cli.server.server_store import open_store, store_options
from palestra.util.json_types import JsonObject

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from palestra.store import Store
    from palestra.store.records import Key

T = TypeVar("T")

RIGHTS = ["admin", "trainer", "worker", "episode", "metrics", "replica"]
FIRST = (
    "this is the first key: from now on, also a server on a loopback address needs a valid key from "
    "everyone and answers 401 without one; running servers notice within 2 seconds"
)
BEFORE = "models made without keys belong to 'local'; for a key that sees them: palestra key create --owner local"


@click.group()
def key() -> None:
    """Make, list, rotate and revoke API keys."""


@key.command()
@click.option("--name", help="Name of the key, unique among the keys in use. [generated]")
@click.option(
    "--owner",
    help="Keys of one owner see the same models and checkpoints; 'local' owns those made before there were "
    "keys. [the key's name]",
)
@click.option("--right", type=click.Choice(RIGHTS), default="trainer", show_default=True, help="What the key allows.")
@click.option("--expires", type=Duration(), help="Time after which the key ends by itself, such as 12h or 30d.")
@click.option(
    "--quota",
    "limits",
    multiple=True,
    metavar="LIMIT=AMOUNT",
    help="Limit of the key's owner, as in `palestra quota set`; may be repeated.",
)
@store_options
def create(
    name: str | None,
    owner: str | None,
    right: str,
    expires: float | None,
    limits: tuple[str, ...],
    as_json: bool,
    **where: Any,
) -> None:
    """Make a key and show it; it cannot be shown again."""
    name = name or f"key-{secrets.token_hex(3)}"
    quota = parse_limits(limits)
    with open_store(**where, create=True) as store:
        from palestra.store.queries.keys import create_key, list_keys
        from palestra.store.queries.quotas import set_quota
        from palestra.store.records import NewKey, Rights

        def write(conn: Connection) -> NewKey:
            now = time.time()
            until = None if expires is None else now + expires
            if quota:
                set_quota(conn, owner or name, quota)
            return create_key(conn, name=name, owner=owner or name, rights=Rights(right), now=now, expires_at=until)

        with one_line_errors(ValueError):
            made = store.write_now(write)
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
@store_options
def list_(revoked: bool, as_json: bool, **where: Any) -> None:
    """List the keys in use."""
    with open_store(**where) as store:
        from palestra.store.queries.keys import list_keys

        known = store.read_now(lambda conn: list_keys(conn, revoked=True))
    keys = [one for one in known if revoked or one.revoked_at is None]
    if as_json:
        print_json([key_json(one) for one in keys])
        return
    if not keys:
        what = "all keys are revoked, so the server cannot be used" if known else "no keys"
        click.echo(f"{what}; to make one: palestra key create")
        return
    columns = ("id", "name", "owner", "right", "created_at", "last_used_at", "expires_at")
    columns += ("revoked_at",) if revoked else ()
    rows = [[column.removesuffix("_at").replace("_", " ") for column in columns]]
    rows += [[str(shown[column] or "") for column in columns] for shown in map(key_json, keys)]
    print_table(rows)


@key.command()
@click.argument("which", metavar="ID_OR_NAME")
@click.option(
    "--grace",
    type=Duration(),
    default="0s",
    show_default=True,
    help="How long the present text of the key works beside the new one, such as 24h.",
)
@store_options
def rotate(which: str, grace: float, as_json: bool, **where: Any) -> None:
    """Give a key a new text and show it. Its number, name, owner and right stay."""
    with open_store(**where) as store:
        from palestra.store.queries.keys import rotate_key

        made = _first_meant(store, which, lambda conn, one: rotate_key(conn, one, now=time.time(), grace_s=grace))
    if as_json:
        print_json({"key": made.text, **key_json(made.key)})
        return
    click.echo(made.text)
    until = f"works until {time_text(made.key.old_until)}" if grace else "no longer works"
    click.echo(f"key {made.key.key_id} {made.key.name!r} has a new text; the old one {until}", err=True)


@key.command()
@click.argument("which", metavar="ID_OR_NAME")
@store_options
def revoke(which: str, as_json: bool, **where: Any) -> None:
    """Revoke a key for ever."""
    with open_store(**where) as store:
        from palestra.store.queries.keys import revoke_key

        gone = _first_meant(store, which, lambda conn, one: revoke_key(conn, one, now=time.time()))
    print_result(as_json, key_json(gone), f"key {gone.key_id} {gone.name!r} of {gone.owner!r} is revoked")


def _first_meant(store: Store, which: str, work: Callable[[Connection, int | str], T | None]) -> T:
    """Works on the key that is meant: a number is an id, or else a name. Fails if there is none."""
    for meaning in [int(which), which] if which.isdecimal() else [which]:
        found = store.write_now(lambda conn, one=meaning: work(conn, one))
        if found is not None:
            return found
    raise fail(f"no key in use is called {which!r}; to see them: palestra key list", NOT_FOUND)


def key_json(one: Key) -> JsonObject:
    return {
        "id": one.key_id,
        "name": one.name,
        "owner": one.owner,
        "right": str(one.rights),
        "created_at": time_text(one.created_at),
        "revoked_at": time_text(one.revoked_at),
        "last_used_at": time_text(one.last_used_at),
        "expires_at": time_text(one.expires_at),
        "old_until": time_text(one.old_until),
    }


def time_text(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
