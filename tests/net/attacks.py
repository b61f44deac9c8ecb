"""What somebody sends who wants to keep a server from its work: raw sockets, and how far they got."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from typing import NamedTuple

MB = 1_000_000
FAR_LESS_THAN_ALL = 40 * MB
"""What is read to its end of a refused request, and what the system keeps for both sides."""
TIMEOUT_S = 60.0


class Sent(NamedTuple):
    size: int
    answer: bytes
    """All that came until the connection was closed, or until nothing more was to be sent."""

    @property
    def status(self) -> int:
        return int(self.answer.split(b" ", 2)[1]) if self.answer else 0


def send(port: int, parts: Iterable[bytes], *, health: str | None = "/healthz") -> Sent:
    """Until the server closes the connection. `health`: what is answered to others after each part."""
    size, answer = 0, b""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as line:
        try:
            for part in parts:
                line.sendall(part)
                size += len(part)
                if health is not None:
                    assert is_healthy(port, health)
        except OSError:
            pass  # it has closed the connection; the answer may still be there
        try:
            while data := line.recv(1 << 16):
                answer += data
        except OSError:
            pass
    return Sent(size, answer)


def is_healthy(port: int, path: str = "/healthz") -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as line:
        line.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        return line.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def long_header(size: int = 64 * MB) -> Iterator[bytes]:
    yield b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-long: "
    yield from [b"x" * MB] * (size // MB)
    yield b"\r\nconnection: close\r\n\r\n"


def many_headers(count: int = 10_000) -> Iterator[bytes]:
    fields = b"".join(b"x-%d: %d\r\n" % (number, number) for number in range(count))
    yield b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + fields + b"\r\n"


def long_url(size: int = 200_000) -> Iterator[bytes]:
    yield b"GET /healthz?" + b"x" * size + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


def long_body(path: str = "/healthz", size: int = 600 * MB, *fields: str) -> Iterator[bytes]:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *fields]
    yield "\r\n".join([*lines, f"content-length: {size}", "", ""]).encode()
    yield from [b"x" * MB] * (size // MB)


def long_chunks(path: str = "/healthz", size: int = 600 * MB, *fields: str) -> Iterator[bytes]:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *fields]
    yield "\r\n".join([*lines, "transfer-encoding: chunked", "", ""]).encode()
    yield from [b"%x\r\n%s\r\n" % (MB, b"x" * MB)] * (size // MB)
    yield b"0\r\n\r\n"


def check_bounds(port: int, health: str = "/healthz") -> None:
    """That heads and bodies which nobody wants are bounded, and that others are answered meanwhile."""
    sent = send(port, long_header(), health=health)
    assert (sent.status, sent.size < FAR_LESS_THAN_ALL) == (431, True), sent.size
    for head in (many_headers(), long_url()):
        assert send(port, head, health=health).status == 431
    for body in (long_body(), long_chunks()):
        sent = send(port, body, health=health)
        assert 200 <= sent.status < 500
        assert sent.size < FAR_LESS_THAN_ALL
    assert is_healthy(port, health)
