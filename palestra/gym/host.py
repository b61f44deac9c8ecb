"""A process with servers of a gym, each on its own port: `python -m palestra.gym.host`, started by the supervisor."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
import traceback
from contextlib import AsyncExitStack

import uvloop

from palestra.gym.errors import GymConfigError, GymError
from palestra.gym.http_app import GymHttpApp
from palestra.gym.peers import GymPeers
from palestra.gym.records import ServerInstance
from palestra.gym.registry import load_class
from palestra.gym.servers.base import GymServer
from palestra.gym.start import BAD_CODE, BAD_SETTINGS, ProcessStart, read_start
from palestra.net.serving import HttpServer

KEEP_ALIVE_S = 30  # NeMo Gym's value
GOODBYE_S = 1  # for answers under way
CLOSE_S = 2.0  # for what a server does after its last call
FILES = 65535


class GymHostError(GymError):
    """A server of ours cannot be made or opened."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(f"{name}: {error}")
        is_final = isinstance(error, ValueError | TypeError | ImportError | SyntaxError)
        self.exit_code = BAD_SETTINGS if isinstance(error, GymError) else BAD_CODE if is_final else 1


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    _raise_file_limit()
    try:
        start = read_start(os.fdopen(os.dup(0), "rb", buffering=0))
    except EOFError:
        return 0
    if start.config.settings.get("verbose"):
        logging.getLogger().setLevel(logging.DEBUG)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(start))
    except GymHostError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        logging.error("cannot serve %s", error)
        return error.exit_code
    return 0


async def _run(start: ProcessStart) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    loop.add_reader(0, stop.set)  # nothing more is ever written: readable means closed
    async with AsyncExitStack() as stack:
        peers = await stack.enter_async_context(GymPeers(start.config))
        servers = _made([start.config.servers[name] for name in start.sockets], peers)
        for server in servers:
            peers.add(server)
        stack.push_async_callback(_close, servers)
        await asyncio.gather(*(_opened(server) for server in servers))
        await _serve([(server, start.sockets[server.name]) for server in servers], start.config.secret, stop)


def _made(instances: list[ServerInstance], peers: GymPeers) -> list[GymServer]:
    """Makes all servers, or raises an error with the mistakes in the settings of all."""
    made: list[GymServer] = []
    mistakes: dict[str, GymConfigError] = {}
    for instance in instances:
        try:
            made.append(load_class(instance)(instance, peers))
        except GymConfigError as error:
            mistakes[instance.name] = error
        except Exception as error:  # boundary: a server's own code; the error names it
            raise GymHostError(instance.name, error) from error
    if mistakes:
        raise GymHostError(", ".join(mistakes), GymConfigError("\n".join(map(str, mistakes.values()))))
    return made


async def _opened(server: GymServer) -> None:
    try:
        await server.open()
    except Exception as error:  # boundary: a server's own code; the error names it
        raise GymHostError(server.name, error) from error


async def _serve(servers: list[tuple[GymServer, int]], secret: str, stop: asyncio.Event) -> None:
    """Serves until it is stopped, or until one of them ends: then all end, and the supervisor restarts the process."""
    fronts = [(_front(server, secret), socket.socket(fileno=number)) for server, number in servers]
    serving = [asyncio.create_task(front.serve([listener])) for front, listener in fronts]
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({*serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    for front, _ in fronts:
        front.should_exit = True
    stopping.cancel()
    await asyncio.gather(*serving)


def _front(server: GymServer, secret: str) -> HttpServer:
    return HttpServer(
        GymHttpApp(server, secret),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GOODBYE_S,
    )


async def _close(servers: list[GymServer]) -> None:
    closing = [asyncio.create_task(server.close()) for server in servers]
    _, late = await asyncio.wait(closing, timeout=CLOSE_S)
    for task in late:
        task.cancel()
    for server, ended in zip(servers, await asyncio.gather(*closing, return_exceptions=True), strict=True):
        if isinstance(ended, BaseException):
            logging.warning("%s could not be closed: %r", server.name, ended)


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


if __name__ == "__main__":
    raise SystemExit(main())
