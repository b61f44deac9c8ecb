"""The ports of a gym, bound from the moment they are chosen, so that no other process can take them.

The sockets listen from the start and are passed to the servers. While a server is restarted, callers wait in the queue
of its socket instead of being refused.
"""

from __future__ import annotations

import errno
import random
import socket

from palestra.gym.errors import GymConfigError

TRIES = 200
BACKLOG = 4096
TAKEN = (errno.EADDRINUSE, errno.EACCES)


class ReservedPorts:
    """The reserved ports by address. Close it, or use it as a context manager."""

    def __init__(self, *, is_binding: bool = True) -> None:
        """`is_binding=False`: ports are only named, for a config that is inspected and not started."""
        self._is_binding = is_binding
        self._reserved: dict[tuple[str, int], socket.socket | None] = {}

    def __enter__(self) -> ReservedPorts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for reserved in self._reserved.values():
            if reserved is not None:
                reserved.close()
        self._reserved.clear()

    def socket_of(self, host: str, port: int) -> socket.socket:
        reserved = self._reserved[host, port]
        assert reserved is not None, "these ports are only named"
        return reserved

    def numbers(self) -> list[int]:
        return sorted(port for _, port in self._reserved)

    def reserve(self, host: str, port: int, who: str) -> int:
        """Reserves exactly this port; 0 is any. Raises GymConfigError if another process has it."""
        try:
            return self._reserve(host, port)
        except OSError as error:
            reason = error.strerror or error
            raise GymConfigError(f"{who}: cannot listen at {host}:{port} ({reason}); choose another") from None

    def reserve_for(self, host: str, port: int, here: str) -> int:
        """Reserves any free port of this machine, for a server that others know by another machine's address."""
        listener = listening(here, 0)
        self._reserved[host, port] = listener
        return listener.getsockname()[1]

    def reserve_any(self, host: str, low: int, high: int, *, avoid: set[int], who: str) -> int:
        """Reserves a free port of a range."""
        wide = f"widen port_range_low={low}, port_range_high={high}"
        span = range(low, high + 1)
        drawn = random.sample(span, min(TRIES, len(span)))
        candidates = [port for port in drawn if port not in avoid.union(self.numbers())]
        for port in candidates:
            try:
                return self._reserve(host, port)
            except OSError as error:
                if error.errno not in TAKEN:
                    reason = error.strerror or error
                    raise GymConfigError(f"{who}: cannot listen at {host} ({reason}); choose another host") from None
        raise GymConfigError(f"{who}: found no free port in {len(candidates)} tries; {wide}")

    def _reserve(self, host: str, port: int) -> int:
        if not self._is_binding:
            self._reserved[host, port] = None
            return port
        listener = listening(host, port)
        number: int = listener.getsockname()[1]
        self._reserved[host, number] = listener
        return number


def listening(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # allows the same port again right after a stop
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
