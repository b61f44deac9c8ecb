"""Answers leave whole, and nothing is held back: a real uvicorn, real sockets."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn

from palestra.server.whole_answers import LARGE_BYTES, WholeAnswers

LARGE = bytes(range(256)) * (LARGE_BYTES // 64)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of a server for `app`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, http=WholeAnswers, lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        serving = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        serving.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        serving.join(10)


has_stopped = threading.Event()


async def app(scope: Any, receive: Any, send: Any) -> None:
    """/short, /large: at once. /parts: a part for each part of the body. /forever: until nobody takes it."""
    message = await receive()
    if scope["path"] == "/forever":
        await _say_forever(send)
    body = {"/short": b"short", "/large": LARGE, "/parts": b""}[scope["path"]]
    headers = [] if scope["path"] == "/parts" else [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while message.get("more_body"):
        await send({"type": "http.response.body", "body": message["body"].upper(), "more_body": True})
        message = await receive()
    await send({"type": "http.response.body", "body": body})


async def _say_forever(send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    try:
        while True:
            await send({"type": "http.response.body", "body": b"more", "more_body": True})
            await asyncio.sleep(0.01)
    finally:
        has_stopped.set()


@pytest.fixture
def ask(port: int) -> Iterator[Callable[[bytes], socket.socket]]:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:

        def ask(request: bytes) -> socket.socket:
            connection.sendall(request)
            return connection

        yield ask


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: localhost", *headers, "", ""]).encode()


def read_until(connection: socket.socket, end: bytes) -> bytes:
    heard = b""
    while not heard.endswith(end):
        heard += connection.recv(1 << 20)
    return heard


def test_head_and_body_come_in_one_piece(ask):
    for _ in range(20):
        assert ask(get("/short")).recv(1 << 20).endswith(b"\r\n\r\nshort")


def test_a_large_body_comes_whole_and_in_order(ask):
    for _ in range(3):
        head, _, body = read_until(ask(get("/large")), LARGE).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert body == LARGE


def test_answers_to_requests_that_came_at_once_keep_their_order(ask):
    connection = ask(get("/short") + get("/large") + get("/short"))
    heard = read_until(connection, b"short")
    while heard.count(b"short") < 2:
        heard += read_until(connection, b"short")
    assert heard.count(b"HTTP/1.1 200") == 3
    assert heard.index(b"short") < heard.index(LARGE) < heard.rindex(b"short")


def test_a_part_is_not_held_back_for_the_next(ask):
    """The next part of the body is sent when the answer's last one has come."""
    connection = ask(b"POST /parts HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
    for word in (b"one", b"two", b"three"):
        connection.sendall(b"%x\r\n%s\r\n" % (len(word), word))
        read_until(connection, word.upper() + b"\r\n")
    connection.sendall(b"0\r\n\r\n")
    assert read_until(connection, b"0\r\n\r\n")


def test_an_answer_that_nobody_takes_is_stopped(ask):
    """With another request behind it, uvicorn does not say so to the first: writing must."""
    connection = ask(get("/forever") + get("/short"))
    assert connection.recv(1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
    connection.close()
    assert has_stopped.wait(10)


def test_what_was_said_comes_before_the_end(ask):
    connection = ask(get("/short", "connection: close"))
    assert read_until(connection, b"short")
    assert connection.recv(1) == b""
