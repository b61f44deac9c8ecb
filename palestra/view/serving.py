"""`palestra view`: listens until it is stopped."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from palestra.net.serving import HttpServer
from palestra.types.gym import GYM_HEAD
from palestra.view.access import Access
from palestra.view.app import create_app
from palestra.view.runs.catalogue import Catalogue


class ViewError(Exception):
    """The dashboard cannot start."""


def serve(
    root: Path, host: str, port: int, access: Access, started: Callable[[str], None], gym: str = GYM_HEAD
) -> None:
    """Serves the runs of a folder until SIGINT or SIGTERM. `started` gets the address."""
    listener = _bind(host, port)
    try:
        asyncio.run(_serve(create_app(Catalogue(root), access, gym=gym), listener, started))
    finally:
        listener.close()


def make_server(app: FastAPI, **settings: Any) -> HttpServer:
    """A server whose end ends the streams of its pages, for which it waits. `settings`: those of `uvicorn.Config`."""
    server = HttpServer(app, lifespan="off", server_header=False, **settings)
    app.state.is_stopping = lambda: server.should_exit
    return server


async def _serve(app: FastAPI, listener: socket.socket, started: Callable[[str], None]) -> None:
    server = make_server(app, log_level="warning", timeout_graceful_shutdown=1)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, setattr, server, "should_exit", True)
    address, port = listener.getsockname()[:2]
    named = f"[{address}]" if ":" in address else address
    started(f"http://{named}:{port}")
    await server.serve(sockets=[listener])


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        raise ViewError(f"cannot listen at {host} port {port}: {error.strerror}; choose another with --port") from error
    return listener
