"""`palestra alias`: names for models of a running server, which can be moved.

Owns: arguments and printing. Never touches: HTTP; the training package has the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import rich_click as click

from palestra.cli.output import needs_extra, one_line_errors, print_json
from palestra.cli.run_common import json_option, print_table, time_text

if TYPE_CHECKING:
    from palestra.training.aliases import AliasClient

T = TypeVar("T")

server_option = click.option(
    "--server",
    "url",
    metavar="URL",
    envvar="TINKER_BASE_URL",
    default="http://127.0.0.1:8000",
    show_default=True,
    help="Of a running server. TINKER_API_KEY is the key, where it needs one.",
)


@click.group()
def alias() -> None:
    """Name models of a running server, and move the names."""


@alias.command("list")
@server_option
@json_option
def list_(url: str, as_json: bool) -> None:
    """List your aliases and what they point at."""
    found = call(url, lambda client: client.list())
    if as_json:
        print_json(found)
    elif not found:
        click.echo("no aliases; to make one: palestra alias set NAME MODEL")
    else:
        rows = [[one["id"], one["model"], str(one["version"]), time_text(one["updated_at"])] for one in found]
        print_table([["name", "model", "version", "moved"], *rows])


@alias.command("set")
@click.argument("name")
@click.argument("model")
@server_option
@json_option
def set_(name: str, model: str, url: str, as_json: bool) -> None:
    """Make NAME point at MODEL: a base model, a tinker://…/sampler_weights/… path or a sampling session."""
    moved = call(url, lambda client: client.put(name, model))
    if as_json:
        print_json(moved)
    else:
        click.echo(f"{moved['id']} is {moved['model']} now (version {moved['version']})")


@alias.command()
@click.argument("name")
@server_option
def drop(name: str, url: str) -> None:
    """Delete an alias; what it points at stays."""
    call(url, lambda client: client.drop(name))
    click.echo(f"the alias {name} is gone")


def call(url: str, work: Callable[[AliasClient], Awaitable[T]]) -> T:
    with needs_extra("train"):
        from palestra.training.aliases import AliasClient, AliasError

    async def run() -> T:
        async with AliasClient.open(url) as client:
            return await work(client)

    with one_line_errors(AliasError):
        return asyncio.run(run())
