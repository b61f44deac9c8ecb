"""`palestra sandbox`: which backends can hold a wall here, and running a command behind one."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from palestra.cli.options import renamed_option
from palestra.cli.output import one_line_errors, print_json

if TYPE_CHECKING:
    from palestra.sandbox import ExecResult, SandboxSpec


@click.group()
def sandbox() -> None:
    """Run commands behind a wall, or list what holds one here."""


@sandbox.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def list_(as_json: bool) -> None:
    """List the backends, and whether each can run on this machine."""
    from palestra.sandbox import SandboxError, backend, backend_names

    found: list[dict[str, str | None]] = []
    for name in backend_names():
        try:
            problem = backend(name).problem()
        except SandboxError as error:
            problem = str(error)
        found.append({"name": name, "problem": problem})
    if as_json:
        print_json(found)
        return
    for one in found:
        click.echo(f"{one['name']:<8}  {'no: ' + one['problem'] if one['problem'] else 'yes'}")


@sandbox.command()
@click.argument("command", nargs=-1, required=True)
@renamed_option("--sandbox", "name", old="--backend", default="local", show_default=True, help="Name of the backend.")
@click.option("--image", help="OCI image, or for local a folder with a root file system. [this machine's programs]")
@click.option("--host", help="Machine to run on, for ssh and ray.")
@click.option(
    "--env",
    "-e",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Variable of the command; without a value, your own. May be repeated.",
)
@click.option("--visible", multiple=True, metavar="FOLDER", help="Folder of this machine to show, read only.")
@renamed_option(
    "--endpoint-proxy",
    old="--door",
    metavar="URL",
    help="Model endpoint that can be reached; it appears at 127.0.0.1:8000.",
)
@click.option("--memory-mib", type=click.IntRange(min=1), default=2048, show_default=True, help="Limit of memory.")
@click.option("--disk-mib", type=click.IntRange(min=1), default=1024, show_default=True, help="Limit of written files.")
@renamed_option(
    "--timeout",
    "seconds",
    old="--seconds",
    type=float,
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit of the command.",
)
def run(
    command: tuple[str, ...],
    name: str,
    image: str | None,
    host: str | None,
    env: tuple[str, ...],
    visible: tuple[str, ...],
    endpoint_proxy: str | None,
    memory_mib: int,
    disk_mib: int,
    seconds: float,
) -> None:
    """Run a command in a new sandbox, print its output as it comes, and end with its status. The command follows after
    --. Ctrl-C ends it and removes the sandbox."""
    from palestra.sandbox import EndpointProxy, SandboxError, SandboxLimits, SandboxSpec

    with one_line_errors(SandboxError, ValueError):
        limits = SandboxLimits(memory_bytes=memory_mib << 20, disk_bytes=disk_mib << 20, exec_s=seconds)
        spec = SandboxSpec(
            image=image,
            host=host,
            env=dict(_pair(one) for one in env),
            host_folders=tuple(str(Path(one).absolute()) for one in visible),
            endpoint_proxy=EndpointProxy(endpoint_proxy) if endpoint_proxy else None,
            limits=limits,
        )
        done = asyncio.run(_run(name, spec, command))
    if done.is_late:
        click.echo(f"the command took longer than {seconds:g} s and was killed", err=True)
    if done.is_truncated:
        click.echo("there was more output than is kept", err=True)
    raise SystemExit(done.status)


def _pair(text: str) -> tuple[str, str]:
    name, is_pair, value = text.partition("=")
    if not is_pair and text in os.environ:
        return text, os.environ[text]
    if not is_pair or not name:
        raise ValueError(f"--env should be NAME=VALUE, or the name of a variable that is set, is {text!r}")
    return name, value


async def _run(name: str, spec: SandboxSpec, command: tuple[str, ...]) -> ExecResult:
    from palestra.sandbox import sandbox as made

    async with made(name, spec) as box:
        return await box.exec(command, on_output=_print)


async def _print(number: int, data: bytes) -> None:
    def write() -> None:
        stream = {1: sys.stdout, 2: sys.stderr}[number].buffer
        stream.write(data)
        stream.flush()

    await asyncio.to_thread(write)  # a full pipe must not hold up the rest
