"""Commands that are typed right after `palestra serve &`: they wait until the server has started, and say so."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from palestra.cli import main
from palestra.endpoints.aliases import AliasClient, AliasError
from palestra.server.app import StartingGate
from tests.ports import free_port
from tests.view.browser import served

NO_ALIASES = "no aliases; to make one: palestra alias set NAME MODEL\n"


class Opening:
    """A gate that opens when it was asked a number of times."""

    def __init__(self, asked: int | None) -> None:
        aliases = Route("/v1/aliases", lambda request: JSONResponse({"object": "list", "data": []}))
        self.gate = StartingGate(time.monotonic() - 30)
        self.gate.app = Starlette(routes=[aliases])
        self._left = asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._left is not None:
            self.gate.is_open, self._left = self._left <= 0, self._left - 1
        await self.gate(scope, receive, send)


def alias_list(port: int) -> Result:
    return CliRunner().invoke(main, ["alias", "list", "--server", f"http://127.0.0.1:{port}"])


def test_a_command_waits_for_a_server_that_starts_and_says_for_how_long_it_has():
    with served(Opening(asked=2)) as port:
        result = alias_list(port)
    assert (result.exit_code, result.stdout) == (0, NO_ALIASES), result.stderr
    assert re.search(r"is starting, for [3-9]\d s so far; waiting for it", result.stderr)
    assert result.stderr.count("\n") == 1


def test_a_command_does_not_wait_for_a_server_that_stands_by():
    opening = Opening(asked=None)
    opening.gate.standing_by = "standing by: another server has the database"
    with served(opening) as port:
        result = alias_list(port)
    assert (result.exit_code, result.stderr) == (1, "error: standing by: another server has the database\n")


def test_who_does_not_wait_is_told_that_the_server_is_starting():
    async def ask(port: int) -> None:
        async with AliasClient.open(f"http://127.0.0.1:{port}") as client:
            await client.list()

    with served(Opening(asked=None)) as port, pytest.raises(AliasError, match=r"is starting, for \d+ s so far"):
        asyncio.run(ask(port))


def test_a_server_has_its_port_before_it_imports_anything_slow():
    script = (
        "import socket, sys\n"
        "from palestra.config.serve import load_serve_config\n"
        "from palestra.server.listeners import open_listeners\n"
        "(listener,) = open_listeners(load_serve_config([], ['port=0'])).sockets\n"
        "socket.create_connection(listener.getsockname()).close()\n"
        "print(sorted({'fastapi', 'uvicorn', 'sqlalchemy', 'torch', 'palestra.server.main'} & sys.modules.keys()))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


@pytest.mark.e2e
def test_a_command_right_after_serve_is_answered(tmp_path: Path):
    port = free_port()
    command = [sys.executable, "-m", "palestra.cli"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    server = subprocess.Popen([*command, "serve", "--port", str(port)], cwd=tmp_path, env=environment)
    try:
        asked = [*command, "alias", "list", "--server", f"http://127.0.0.1:{port}"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False, env=environment)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()
    assert (done.returncode, done.stdout) == (0, NO_ALIASES), done.stderr
    assert "waiting for it" in done.stderr
