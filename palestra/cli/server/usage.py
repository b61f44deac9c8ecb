"""`palestra usage`: what was sampled, trained and saved on a running server."""

from __future__ import annotations

import csv
import sys
from datetime import UTC, date, datetime, timedelta
from typing import Any

import rich_click as click

from palestra.cli.options import server_options
from palestra.cli.output import UNREACHABLE, USAGE, fail, print_json
from palestra.cli.run.common import json_option, print_table
from palestra.util.amounts import parse_duration
from palestra.util.figures import size_text

GROUPINGS = ("owner", "run", "day")
COUNTS = ("prompts", "prompt_tokens", "sampled_tokens", "trained_tokens", "checkpoint_bytes", "engine_s")
ANSWER_S = 60.0


@click.command()
@server_options()
@click.option(
    "--by",
    multiple=True,
    type=click.Choice(GROUPINGS),
    help="What a row is about; may be repeated. [owner]",
)
@click.option("--since", metavar="DAY", help="First day, as 2026-11-01, or how long ago, as 7d. [the beginning]")
@click.option("--until", metavar="DAY", help="Last day, likewise. [today]")
@click.option("--owner", help="Only of this owner, for keys with the right `admin`. [all of them]")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@json_option
def usage(
    server: str,
    key: str | None,
    by: tuple[str, ...],
    since: str | None,
    until: str | None,
    owner: str | None,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Show what owners and runs have used of a server.

    A key shows its own owner; one with the right `admin` shows all owners. Days are by UTC.
    """
    groups = by or ("owner",)
    query = {"by": list(groups), "since": _day(since, "--since"), "until": _day(until, "--until"), "owner": owner}
    rows = _ask(server, key, {name: value for name, value in query.items() if value is not None})
    if as_json:
        print_json(rows)
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, [*groups, *COUNTS], extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    elif not rows:
        click.echo("nothing was used")
    else:
        head = [*groups, *(name.replace("_", " ") for name in COUNTS[:4]), "checkpoints", "engine s"]
        print_table([head, *([*(_name(row[name]) for name in groups), *_figures(row)] for row in rows)])


def _ask(server: str, key: str | None, query: dict[str, Any]) -> list[dict[str, Any]]:
    import httpx

    try:
        got = httpx.get(
            f"{server.rstrip('/')}/api/v1/usage", params=query, headers={"X-API-Key": key or ""}, timeout=ANSWER_S
        )
        body = got.json()
    except (httpx.TransportError, ValueError) as e:
        raise fail(f"{server} does not answer as a Palestra server: {e}", UNREACHABLE) from None
    if not got.is_success:
        raise fail(f"{server} refuses: {body.get('detail', got.status_code)}")
    return body["usage"]


def _day(text: str | None, option: str) -> str | None:
    if text is None:
        return None
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        pass
    try:
        return (datetime.now(UTC) - timedelta(seconds=parse_duration(text))).date().isoformat()
    except (ValueError, OverflowError):
        raise fail(f"{option}: {text!r} is neither a day as 2026-11-01 nor a time as 7d", USAGE) from None


def _name(text: str) -> str:
    return text or "base model"


def _figures(row: dict[str, Any]) -> list[str]:
    counts = [f"{row[name]:,}" for name in COUNTS[:4]]
    return [*counts, size_text(row["checkpoint_bytes"]), f"{row['engine_s']:,.1f}"]
