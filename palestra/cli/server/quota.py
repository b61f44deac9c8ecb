"""`palestra quota`: what each owner may use of a server. Works beside a running server, which notices within
seconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich_click as click

from palestra.cli.output import NOT_FOUND, USAGE, fail, one_line_errors, print_json, print_result
from palestra.cli.run.common import print_table
from palestra.cli.server.server_store import open_store, store_options
from palestra.util.amounts import parse_amount
from palestra.util.suggest import did_you_mean

LIMITS = ("models", "pending_samples", "pending_bytes", "tokens_per_day", "checkpoint_bytes", "picture_bytes")
NONE = "none"
ALL_OWNERS = "*"
SHOWN_ALL_OWNERS = "all other owners"


def parse_limits(given: Iterable[str]) -> dict[str, int | None]:
    """Limits as they are typed: `models=4`, `tokens_per_day=2M`, `models=none`. Fails with one line."""
    limits: dict[str, int | None] = {}
    for one in given:
        name, _, amount = one.partition("=")
        if name not in LIMITS:
            raise fail(f"unknown limit {name!r}; {did_you_mean(name, list(LIMITS))}", USAGE)
        try:
            limits[name] = None if amount == NONE else parse_amount(amount)
        except ValueError as e:
            raise fail(f"{name}: {e}, or {NONE}", USAGE) from None
    return limits


@click.group()
def quota() -> None:
    """Limit what each owner may use of a server."""


@quota.command("set")
@click.argument("owner")
@click.argument("limits", nargs=-1, required=True, metavar="LIMIT=AMOUNT …")
@store_options
def set_(owner: str, limits: tuple[str, ...], as_json: bool, **where: Any) -> None:
    """Set limits of an OWNER, or with '*' of every owner that has none of its own.

    models: in training at the same time. pending_samples: that wait or run. pending_bytes: of training requests that
    wait or run. tokens_per_day: of prompts, sampled and trained, by UTC. checkpoint_bytes: that are kept.
    picture_bytes: of pictures that are kept for conversations. Amounts are numbers such as 8, 2M or 40GB; `none`
    removes a limit.
    """
    parsed = parse_limits(limits)
    with open_store(**where, create=True) as store:
        from palestra.store.queries.quotas import set_quota

        with one_line_errors(ValueError):
            stored = store.write_now(lambda conn: set_quota(conn, owner, parsed))
    shown = quota_json(stored)
    limits_text = ", ".join(f"{name} {shown[name]:,}" for name in LIMITS if shown[name] is not None)
    print_result(as_json, shown, f"{_name(owner)}: {limits_text or 'no limits'}")


@quota.command("list")
@store_options
def list_(as_json: bool, **where: Any) -> None:
    """List the limits of owners."""
    with open_store(**where) as store:
        from palestra.store.queries.quotas import list_quotas

        found = [quota_json(one) for one in store.read_now(list_quotas)]
    if as_json:
        print_json(found)
    elif not found:
        click.echo("no owner has limits of its own; to set some: palestra quota set OWNER tokens_per_day=2M")
    else:
        rows = [[_name(one["owner"]), *(_shown(one[name]) for name in LIMITS)] for one in found]
        print_table([["owner", *(name.replace("_", " ") for name in LIMITS)], *rows])


@quota.command()
@click.argument("owner")
@store_options
def delete(owner: str, as_json: bool, **where: Any) -> None:
    """Delete all limits of an OWNER; those for all owners hold for it again."""
    with open_store(**where) as store:
        from palestra.store.queries.quotas import remove_quota

        is_gone = store.write_now(lambda conn: remove_quota(conn, owner))
    if not is_gone:
        raise fail(f"{owner!r} has no limits of its own; to see all: palestra quota list", NOT_FOUND)
    print_result(as_json, {"owner": owner}, f"{_name(owner)} has no limits of its own any more")


def quota_json(one: Any) -> dict[str, Any]:
    return {"owner": one.owner, **{name: getattr(one, name) for name in LIMITS}}


def _name(owner: str) -> str:
    return SHOWN_ALL_OWNERS if owner == ALL_OWNERS else owner


def _shown(limit: int | None) -> str:
    return "" if limit is None else f"{limit:,}"
