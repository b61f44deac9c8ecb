"""Waiting for a server that has been started and does not serve yet."""

from __future__ import annotations

import time
from urllib.parse import urlsplit

import rich_click as click

LOOPBACK = ("127.0.0.1", "localhost", "::1")
FIRST_USER_PORT = 1024  # those below belong to services that are always there
ASK_AGAIN_S = 0.5
SAY_AGAIN_S = 10.0
CONNECT_S = 2.0
ANSWER_S = 3.0
NO_PORT_S = 3.0  # `palestra serve &` in the line before: it takes about a second until it has its port
SILENT_S = 60.0  # for so long a server may import its parts before it answers


def wait_for_start(server: str) -> None:
    """Returns when the server has started, or is none that starts: then the command's own call says what is wrong."""
    try:
        parts = urlsplit(server)
        may_have_no_port_yet = parts.hostname in LOOPBACK and (parts.port or 0) >= FIRST_USER_PORT
    except ValueError:
        return
    if parts.path.strip("/"):
        return  # an endpoint such as https://…/v1, which need not be ours
    import httpx

    began = time.monotonic()
    noted_at = began - SAY_AGAIN_S
    while True:
        try:
            answer = httpx.get(f"{server.rstrip('/')}/readyz", timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S))
            starting_s = answer.json()["starting_s"] if answer.status_code == 503 else None
            if not isinstance(starting_s, int | float):
                return
            state = f"is starting, for {starting_s:.0f} s so far"
        except httpx.ReadTimeout:  # it has a port already
            if time.monotonic() - began > SILENT_S:
                return
            state = "does not answer yet"
        except httpx.ConnectError:
            if not may_have_no_port_yet or time.monotonic() - began > NO_PORT_S:
                return
            time.sleep(ASK_AGAIN_S)
            continue
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError):
            return
        if time.monotonic() - noted_at >= SAY_AGAIN_S:
            noted_at = time.monotonic()
            click.echo(f"the server at {server} {state}; waiting for it", err=True)
        time.sleep(ASK_AGAIN_S)
