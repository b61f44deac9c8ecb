"""The sockets of a server, opened before anything slow is imported: a port in use is reported at once, and clients that
call right after `palestra serve &` are kept waiting instead of being refused.
"""

from __future__ import annotations

import socket
import time

from msgspec import Struct

from palestra.config.serve import ServeConfig

BACKLOG = 4096


class ServeError(Exception):
    """The server cannot start or run; one line says why."""


class Listeners(Struct):
    sockets: list[socket.socket]
    """The server's own, and that of AgentJet's clients if there is one."""
    opened: float
    """By the monotonic clock."""

    def close(self) -> None:
        for listener in self.sockets:
            listener.close()


def open_listeners(config: ServeConfig) -> Listeners:
    """Opens the ports that the config names. Raises ServeError."""
    listeners = Listeners([], time.monotonic())
    ports = [(config.host, config.port, "--port")]
    if config.tinkerscript_host is not None:
        ports.append((config.tinkerscript_host, config.tinkerscript.port, "tinkerscript.port=PORT"))
    try:
        for port in ports:
            listeners.sockets.append(bind(*port))
    except ServeError:
        listeners.close()
        raise
    for listener in listeners.sockets:
        listener.listen(BACKLOG)
    return listeners


def bind(host: str, port: int, setting: str) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(found[0], socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(found[4])
    except OSError as e:
        raise ServeError(f"cannot listen on {host}:{port} ({e.strerror}); choose another {setting}") from e
    return listener
