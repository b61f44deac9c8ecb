"""`palestra alias`: names for models of a running server, which can be moved."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import rich_click as click

from palestra.cli.lazy import LazyGroup
from palestra.cli.options import server_options
from palestra.cli.output import needs_extra, one_line_errors, print_json, print_result
from palestra.cli.run.common import json_option, print_table
from palestra.util.figures import time_text

if TYPE_CHECKING:
    from palestra.endpoints.aliases import AliasClient

T = TypeVar("T")

server_and_key = server_options()


@click.group(cls=LazyGroup, old_names={"drop": "delete"})
def alias() -> None:
    """Name models of a running server, and move the names."""


@alias.command("list")
@server_and_key
@json_option
def list_(server: str, key: str | None, as_json: bool) -> None:
    """List your aliases and what they point at."""
    found = call(server, key, lambda client: client.list())
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
@server_and_key
@json_option
def set_(name: str, model: str, server: str, key: str | None, as_json: bool) -> None:
    """Make NAME point at MODEL: a base model, a tinker://…/sampler_weights/… path or a sampling session."""
    moved = call(server, key, lambda client: client.put(name, model))
    print_result(as_json, moved, f"{moved['id']} is {moved['model']} now (version {moved['version']})")


@alias.command()
@click.argument("name")
@server_and_key
def delete(name: str, server: str, key: str | None) -> None:
    """Delete an alias; what it points at stays."""
    call(server, key, lambda client: client.delete(name))
    click.echo(f"the alias {name} is deleted")


def call(server: str, key: str | None, work: Callable[[AliasClient], Awaitable[T]]) -> T:
    with needs_extra("train"):
        from palestra.endpoints.aliases import AliasClient, AliasError

    async def run() -> T:
        async with AliasClient.open(server, key) as client:
            return await work(client)

    with one_line_errors(AliasError):
        return asyncio.run(run())
