"""Answers without ASGI: nobody can tell, in whatever pieces and order requests come. A real uvicorn, real sockets."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.server.direct_answers import LONG_BYTES, MAX_HEAD_BYTES, MAX_HEADS, DirectAnswers, Exchange
from palestra.server.logs import RequestLog

KEEP_ALIVE_S = 1
LARGE = b"x" * 300_000


class Calls:
    """/at-once, /later, /slow, /large: as they are called. /elsewhere: by ASGI, /sometimes: at times. /never: that is
    when they answer."""

    NAMES = ("at-once", "later", "slow", "large", "elsewhere", "sometimes", "never")
    PATHS = frozenset(f"/{name}".encode() for name in NAMES)

    def __init__(self) -> None:
        self.gone, self.began = threading.Event(), threading.Event()
        self.sometimes = itertools.cycle([True, True, False, False, True, False])

    def find(self, url: bytes) -> Call | None:
        return Call(self, url.decode()) if url in self.PATHS else None


class Call:
    def __init__(self, calls: Calls, route: str) -> None:
        self.calls, self.route = calls, route

    def begin(self, exchange: Exchange) -> bool:
        self.calls.began.set()
        match self.route:
            case "/elsewhere":
                return False
            case "/sometimes" if not next(self.calls.sometimes):
                return False
            case "/never":
                exchange.on_gone = self.calls.gone.set
            case "/later" | "/slow":
                delay = 0.5 if self.route == "/slow" else random.random() / 100
                asyncio.get_running_loop().call_later(delay, self._reply, exchange, exchange.body)
            case "/large":
                self._reply(exchange, LARGE)
            case _:
                self._reply(exchange, exchange.body)
        return True

    def _reply(self, exchange: Exchange, body: bytes) -> None:
        exchange.reply(200, b"direct " + body, [(b"retry-after", b"7")])


async def app(scope: Any, receive: Any, send: Any) -> None:
    body, message = b"", {"more_body": True}
    while message.get("more_body"):
        message = await receive()
        body += message.get("body", b"")
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % (5 + len(body)))]}
    )
    await send({"type": "http.response.body", "body": b"asgi " + body})


class Seen(RequestLog):
    def __init__(self) -> None:
        self.requests: list[tuple[str, int]] = []
        super().__init__(app, observe=lambda route, status, _seconds: self.requests.append((route, status)))


@contextmanager
def serving(**options: Any) -> Iterator[tuple[uvicorn.Server, int, Calls, Seen]]:
    calls, log = Calls(), Seen()
    http: Any = partial(DirectAnswers, calls=calls, log=log, **options)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            app,
            http=http,
            lifespan="off",
            log_config=None,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=10,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield server, listener.getsockname()[1], calls, log
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[uvicorn.Server, int, Calls, Seen]]:
    with serving() as served:
        yield served


@pytest.fixture
def line(server: tuple[Any, int, Calls, Seen]) -> Iterator[Line]:
    with connected(server[1]) as line:
        yield line


class Line:
    """A connection."""

    def __init__(self, socket: socket.socket) -> None:
        self.socket, self._heard = socket, b""

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self) -> tuple[bytes, bytes]:
        """Head and body of the next answer."""
        while b"\r\n\r\n" not in self._heard:
            self._hear()
        head, _, self._heard = self._heard.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        wanted = 0 if length is None else int(length[1])
        while len(self._heard) < wanted:
            self._hear()
        body, self._heard = self._heard[:wanted], self._heard[wanted:]
        return head, body

    def ask(self, data: bytes) -> bytes:
        self.send(data)
        return self.read()[1]

    def is_closed(self) -> bool:
        return self.socket.recv(1) == b""

    def _hear(self) -> None:
        data = self.socket.recv(1 << 20)
        assert data, f"it hung up after {self._heard!r}"
        self._heard += data


@contextmanager
def connected(port: int) -> Iterator[Line]:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        yield Line(connection)


def post(path: str, body: bytes = b"", *headers: str, version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "host: localhost", *headers, f"content-length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


def test_an_answer_has_all_that_others_have(line: Line, server: tuple[Any, int, Calls, Seen]) -> None:
    server[3].requests.clear()
    for word in (b"one", b"two"):
        line.send(post("/at-once", word))
        head, body = line.read()
        assert body == b"direct " + word
        lines = head.split(b"\r\n")
        assert lines[0] == b"HTTP/1.1 200 OK"
        assert {b"content-type: application/json", b"content-length: 10", b"retry-after: 7"} <= set(lines)
        assert any(one.startswith(b"date: ") for one in lines)
        assert not any(one.startswith(b"connection:") for one in lines)
    assert server[3].requests == [("/at-once", 200)] * 2


@pytest.mark.parametrize(
    "request_",
    [
        post("/elsewhere", b"body"),
        post("/other", b"body"),
        post("/at-once", b"body", "content-encoding: identity"),
        post("/at-once", b"body", "x-forwarded-for: 1.2.3.4"),
        post("/at-once?query=1", b"body"),
        b"PUT" + post("/at-once", b"body").removeprefix(b"POST"),
        b"POST /at-once HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n",
    ],
)
def test_what_is_not_plain_goes_by_asgi_with_its_body(line: Line, request_: bytes) -> None:
    assert line.ask(request_) == b"asgi body"
    assert line.ask(post("/at-once", b"again")) == b"direct again"


def test_a_head_that_came_before_means_the_same_in_whatever_pieces_it_comes(line: Line) -> None:
    whole, other = post("/at-once", b"body"), post("/at-once", b"a longer one")
    for cut in range(1, len(whole)):
        assert line.ask(whole) == b"direct body"
        for _ in range(2):
            line.send(whole[:cut])
            time.sleep(0.002)
            assert line.ask(whole[cut:]) == b"direct body"
        assert line.ask(other) == b"direct a longer one"
        line.send(whole + whole[:cut])
        assert line.read()[1] == b"direct body"
        time.sleep(0.002)
        assert line.ask(whole[cut:]) == b"direct body"


@pytest.mark.parametrize("more", [b"", b"\r\nx-more: 1"])
def test_a_head_that_came_before_and_goes_on(line: Line, more: bytes) -> None:
    whole = post("/at-once")
    for cut in range(1, len(whole)):
        assert line.ask(whole) == b"direct "
        line.send(whole[:cut])
        time.sleep(0.002)
        rest = whole[cut:] if cut > len(whole) - 4 else whole[cut:-4] + more + whole[-4:]
        assert line.ask(rest) == b"direct "
    line.send(whole[:-4])
    time.sleep(0.02)
    assert line.ask(b"5\r\n\r\n" + b"x" * 5) == b"direct xxxxx"  # content-length: 05


def test_a_head_that_came_before_as_a_part_of_another(line: Line) -> None:
    whole = post("/at-once", b"body")
    assert line.ask(whole) == b"direct body"
    line.send(b"POST /at-once HTTP/1.1\r\nx-first: ")
    time.sleep(0.05)
    assert line.ask(whole) == b"direct body"  # its first line is a header's value
    assert line.ask(post("/other", b"next")) == b"asgi next"
    line.send(whole[:2])
    time.sleep(0.05)
    assert line.ask(whole[2:]) == b"direct body"
    line.send(whole[2:])
    assert line.read()[0].startswith(b"HTTP/1.1 400 ")


def test_a_head_that_came_before_with_another_body(line: Line) -> None:
    for body in (b"body", b"\r\n\r\n", post("/a", b"")[:4], b"ydob"):
        assert line.ask(post("/at-once", body)) == b"direct " + body
    line.send(post("/at-once", b"body") + post("/other", b"more"))
    assert (line.read()[1], line.read()[1]) == (b"direct body", b"asgi more")


def test_more_heads_than_are_remembered(line: Line) -> None:
    for number in (*range(3 * MAX_HEADS), *range(3 * MAX_HEADS)):
        word = b"%d" % number
        assert line.ask(post("/at-once", word, f"x-number: {number}")) == b"direct " + word
        long = "x" * (MAX_HEAD_BYTES + 1)
        assert line.ask(post("/at-once", word, f"x-long: {long}")) == b"direct " + word


def test_a_call_that_goes_by_asgi_at_times_is_answered_once(line: Line) -> None:
    ways = set[bytes]()
    for number in range(30):
        way, _, body = line.ask(post("/sometimes", b"%02d" % number)).partition(b" ")
        assert body == b"%02d" % number
        ways.add(way)
    assert ways == {b"direct", b"asgi"}


def test_a_long_body_goes_by_asgi(line: Line) -> None:
    for length, way in ((LONG_BYTES, b"direct "), (LONG_BYTES + 1, b"asgi "), (99_999, b"asgi "), (100_000, b"asgi ")):
        assert line.ask(post("/at-once", b"x" * length)) == way + b"x" * length


def test_a_body_longer_than_the_server_takes_goes_by_asgi_which_says_so() -> None:
    with serving(max_bytes=10) as (_, port, _, _), connected(port) as line:
        assert line.ask(post("/at-once", b"x" * 10)) == b"direct xxxxxxxxxx"
        assert line.ask(post("/at-once", b"x" * 11)) == b"asgi xxxxxxxxxxx"


def test_one_who_waits_to_be_told_to_go_on_is_told(line: Line) -> None:
    line.send(post("/at-once", b"body", "expect: 100-continue").removesuffix(b"body"))
    assert line.read()[0] == b"HTTP/1.1 100 Continue"
    line.send(b"body")
    assert line.read()[1] == b"asgi body"


@pytest.mark.parametrize(
    "request_",
    [
        post("/at-once", b"", "connection: close"),
        post("/at-once", version="1.0"),
        post("/at-once", b"", "proxy-connection: keep-alive", version="1.0"),
    ],
)
def test_who_wants_no_other_answer_gets_none(line: Line, request_: bytes) -> None:
    assert line.ask(request_).startswith(b"asgi")
    assert line.is_closed()


def test_nonsense_behind_an_answer_is_refused(line: Line) -> None:
    assert line.ask(post("/at-once", b"one")) == b"direct one"
    line.send(b"\0nonsense\r\n\r\n")
    assert line.read()[0].startswith(b"HTTP/1.1 400")
    assert line.is_closed()


PATHS = ("/at-once", "/later", "/elsewhere", "/other")


@given(st.lists(st.tuples(st.sampled_from(PATHS), st.binary(max_size=50)), min_size=1, max_size=8), st.data())
@settings(max_examples=60, deadline=None)
def test_answers_keep_the_order_of_requests_in_whatever_pieces_these_come(
    server: tuple[Any, int, Calls, Seen], asked: list[tuple[str, bytes]], data: st.DataObject
) -> None:
    sent = b"".join(post(path, body) for path, body in asked)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=5)))
    with connected(server[1]) as line:
        line.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
            line.send(sent[begin:end])
            time.sleep(0.001)
        for _, body in asked:
            way, _, told = line.read()[1].partition(b" ")
            assert (way in (b"direct", b"asgi"), told) == (True, body)


def test_an_answer_never_overtakes_the_end_of_the_one_before(line: Line) -> None:
    """That has an odd number of parts, and the last one waits for the next turn of the loop."""
    for pause in range(200):
        line.send(post("/at-once", b"first", "expect: 100-continue"))
        until = time.perf_counter() + pause * 5e-6
        while time.perf_counter() < until:
            pass
        line.send(post("/at-once", b"second"))
        assert line.read()[0] == b"HTTP/1.1 100 Continue"
        assert line.read()[1] == b"asgi first"
        assert line.read()[1] in (b"direct second", b"asgi second")


def test_who_does_not_read_is_not_written_to_without_end(line: Line, server: tuple[Any, int, Calls, Seen]) -> None:
    answered = server[3].requests
    answered.clear()
    line.send(post("/large", b"?") * 500)
    assert line.read()[1] == b"direct " + LARGE
    time.sleep(0.5)
    assert len(answered) < 100, "answers that nobody reads are kept somewhere"
    for _ in range(499):
        assert line.read()[1] in (b"direct " + LARGE, b"asgi ?")


def test_who_leaves_is_noticed_and_nobody_else_is_concerned(server: tuple[Any, int, Calls, Seen], line: Line) -> None:
    _, port, calls, _ = server
    calls.gone.clear()
    calls.began.clear()
    with connected(port) as leaving:
        leaving.send(post("/never"))
        assert calls.began.wait(10)
        assert not calls.gone.is_set()
        leaving.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert calls.gone.wait(10)
    assert line.ask(post("/at-once", b"still there")) == b"direct still there"


def test_a_connection_that_is_not_used_is_closed_and_one_that_is_used_is_not(line: Line) -> None:
    until = time.monotonic() + 2 * KEEP_ALIVE_S
    while time.monotonic() < until:
        assert line.ask(post("/at-once", b"used")) == b"direct used"
        assert line.ask(post("/other", b"used")) == b"asgi used"
        time.sleep(KEEP_ALIVE_S / 10)
    assert line.is_closed()


def test_what_was_asked_before_the_end_is_answered_before_the_end() -> None:
    with serving() as (server, port, calls, _), connected(port) as line, connected(port) as idle:
        assert idle.ask(post("/at-once", b"x")) == b"direct x"
        calls.began.clear()
        line.send(post("/slow", b"last"))
        assert calls.began.wait(10)
        server.should_exit = True
        assert idle.is_closed()
        head, body = line.read()
        assert (b"connection: close" in head, body) == (True, b"direct last")
        assert line.is_closed()
