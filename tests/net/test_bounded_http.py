"""Bounds of heads, of what waits and of bodies that nobody reads: a real server, real sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import pytest

from palestra.net.bounded_http import HttpBounds
from palestra.net.serving import HttpServer
from tests.net.attacks import FAR_LESS_THAN_ALL, MB, TIMEOUT_S, check_bounds, send
from tests.waiting import until

GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /healthz HTTP/1.1\r\nhost: localhost\r\n"
QUICK = HttpBounds(head_timeout_s=0.5)


async def app(scope: Any, receive: Any, send: Any) -> None:
    """/healthz: at once. /echo: the body. /slow: after a while."""
    body = b""
    if scope["path"] == "/slow":
        await asyncio.sleep(0.5)
    while scope["path"] == "/echo":
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def serving(bounds: HttpBounds | None = None) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = HttpServer(app, bounds=bounds, lifespan="off", log_config=None)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(20)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving() as port:
        yield port


@pytest.fixture(scope="module")
def quick() -> Iterator[int]:
    """Heads have little time here."""
    with serving(QUICK) as port:
        yield port


def connected(port: int) -> socket.socket:
    line = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line


def ask(line: socket.socket, request: bytes = GET + b"\r\n") -> int:
    line.sendall(request)
    return int(line.recv(1 << 16).split()[1])


def all_from(line: socket.socket) -> bytes:
    """Until it is closed."""
    heard = b""
    try:
        while data := line.recv(1 << 16):
            heard += data
    except ConnectionResetError:
        pass
    return heard


def head_of(size: int) -> bytes:
    """As long as the bounds count it."""
    rest = size - len("/healthz") - len("host") - len("localhost") - len("x") - 8
    return GET + b"x: " + b"x" * rest + b"\r\n\r\n"


def test_what_is_too_large_is_refused_and_others_are_answered(port: int) -> None:
    check_bounds(port)


def test_a_head_of_64_kib_is_taken_and_a_larger_one_is_not(port: int) -> None:
    with connected(port) as line:
        assert ask(line, head_of(64 << 10)) == 200
        assert ask(line) == 200
        line.sendall(head_of((64 << 10) + 1))
        answer = all_from(line)
    assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert b"at most 65536 bytes and 100 fields" in answer


def test_100_fields_are_taken_and_101_are_not(port: int) -> None:
    fields = [b"x-%d: 1\r\n" % number for number in range(99)]
    with connected(port) as line:
        assert ask(line, GET + b"".join(fields) + b"\r\n") == 200
        assert ask(line, GET + b"".join([*fields, b"x: 1\r\n"]) + b"\r\n") == 431


def test_in_small_pieces_nothing_passes_that_would_not_pass_at_once(port: int) -> None:
    for piece in (b"x" * 1000, b"x: " + b"y" * 998 + b"\r\n", b"\r\n" * 500):
        begin = b"" if piece.startswith(b"\r") else GET if piece.startswith(b"x:") else GET + b"x: "
        sent = send(port, [begin, *[piece] * 70], health=None)
        assert sent.status == 431


@pytest.mark.parametrize("begin", [b"0\r\nx: ", b"5;x="])
def test_fields_behind_a_body_and_marks_of_its_parts_are_bounded_too(port: int, begin: bytes) -> None:
    for path in (b"/healthz", b"/echo"):
        head = b"POST " + path + b" HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        assert send(port, [head + begin, *[b"x" * MB] * 64], health=None).size < FAR_LESS_THAN_ALL


def test_whatever_the_pieces_requests_behind_each_other_are_answered_in_order(port: int) -> None:
    bodies = [b"a" * 70_000, b"b" * 10, b"c" * 200_000]
    head = b"POST /echo HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 60_000 + b"\r\ncontent-length: %d\r\n\r\n"
    sent = b"".join(head % len(body) + body for body in bodies)
    for cut in (1, 60_000, 130_050, 135_000, len(sent) - 1):
        with connected(port) as line:
            line.sendall(sent[:cut])
            line.sendall(sent[cut:])
            heard = b""
            while not heard.endswith(bodies[2]):
                heard += line.recv(1 << 20)
            assert heard.count(b"HTTP/1.1 200") == 3
            assert heard.index(bodies[0]) < heard.index(b"b" * 10) < heard.index(bodies[2])


def test_a_head_that_takes_too_long_is_refused(quick: int) -> None:
    before = (b"", GET + b"\r\n", b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nab")
    with ExitStack() as lines:
        slow = [lines.enter_context(connected(quick)) for _ in before]
        for line, first in zip(slow, before, strict=True):
            line.sendall(first + b"GET /hea")
        for line in slow:
            answer = all_from(line)
            assert b"HTTP/1.1 408 Request Timeout" in answer
            assert b"within 0.5 seconds" in answer


def test_a_trickling_head_is_refused(quick: int) -> None:
    with connected(quick) as line:
        line.settimeout(0.02)
        line.sendall(GET + b"x: ")
        for _ in range(3000):  # a minute, on a machine that is busy
            try:
                answer = line.recv(1 << 16)
            except TimeoutError:
                line.sendall(b"x")
            else:
                break
        assert answer.startswith(b"HTTP/1.1 408")


def test_who_says_nothing_is_hung_up_on_without_a_word(quick: int) -> None:
    with connected(quick) as line:
        assert all_from(line) == b""


def test_a_body_may_take_its_time_and_so_may_the_next_request(quick: int) -> None:
    with connected(quick) as line, connected(quick) as idle:
        line.sendall(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\na")
        assert ask(idle) == 200
        time.sleep(2 * QUICK.head_timeout_s)
        line.sendall(b"b")
        assert line.recv(1 << 16).endswith(b"ab")
        assert ask(idle) == 200


def test_the_rest_of_a_body_that_nobody_reads_has_little_time(quick: int) -> None:
    with connected(quick) as line:
        assert ask(line, POST + b"content-length: 100\r\n\r\nx") == 200
        assert all_from(line) == b""


def test_a_short_body_that_nobody_reads_costs_nobody_the_connection(port: int) -> None:
    with connected(port) as line:
        assert ask(line, POST + b"content-length: 5000000\r\n\r\n") == 200
        line.sendall(b"x" * 5 * MB)
        assert ask(line) == 200


def ask_for_much(line: socket.socket, size: int) -> None:
    """An answer that the system's own buffers do not take."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    head = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    line.sendall(head % size + b"x" * size)


def is_held(line: socket.socket) -> bool:
    """By the server, which is in this process."""
    ours = line.getsockname()
    return any(one.raddr == ours for one in psutil.Process().net_connections("tcp"))


def test_who_takes_nothing_of_an_answer_is_cut_off() -> None:
    with serving(HttpBounds(unread_answer_s=0.2)) as port, connected(port) as line:
        ask_for_much(line, 20 * MB)
        until(lambda: not is_held(line))


def test_who_takes_nothing_is_cut_off_where_too_many_wait() -> None:
    with serving(HttpBounds(max_waiting=2)) as port, ExitStack() as lines:
        line = lines.enter_context(connected(port))
        ask_for_much(line, 20 * MB)
        for _ in range(100):
            assert ask(lines.enter_context(connected(port))) == 200
            if not is_held(line):
                return
    pytest.fail("it is held though others have come")


@pytest.mark.slow
def test_an_answer_may_be_taken_slowly() -> None:
    size = 40 * MB
    with serving(HttpBounds(unread_answer_s=2)) as port, connected(port) as line:
        line.sendall(POST.replace(b"/healthz", b"/echo") + b"content-length: %d\r\n\r\n" % size + b"x" * size)
        heard, end = 0, time.monotonic() + 6
        while time.monotonic() < end:
            heard += len(line.recv(1 << 18))
            time.sleep(0.05)
        assert heard < size
        while heard < size and (data := line.recv(1 << 20)):
            heard += len(data)
        assert heard > size


def test_heads_that_are_not_whole_are_bounded_in_all_and_the_oldest_go_first() -> None:
    bounds = HttpBounds(max_waiting_bytes=1 << 20)
    with serving(bounds) as port, ExitStack() as lines:
        held = [lines.enter_context(connected(port)) for _ in range(30)]
        for line in held:
            line.sendall(GET + b"x: " + b"x" * 60_000)
            assert ask(lines.enter_context(connected(port))) == 200  # in turn: what was sent before is read
        assert [all_from(line) for line in held[:10]] == [b""] * 10
        held[-1].sendall(b"\r\n\r\n")
        assert held[-1].recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_connections_that_wait_are_bounded_and_those_that_waited_longest_go_first() -> None:
    with serving(HttpBounds(max_waiting=10)) as port, ExitStack() as lines:
        used = lines.enter_context(connected(port))
        used.sendall(GET.replace(b"/healthz", b"/slow") + b"\r\n")
        idle = lines.enter_context(connected(port))
        assert ask(idle) == 200
        held = [lines.enter_context(connected(port)) for _ in range(15)]
        assert all_from(idle) == b""
        assert [all_from(line) for line in held[:4]] == [b""] * 4
        assert used.recv(1 << 16).startswith(b"HTTP/1.1 200")  # its request was under way
        assert ask(held[-1]) == 200


def test_amid_an_answer_a_large_head_ends_the_connection(port: int) -> None:
    with connected(port) as line:
        line.sendall(GET.replace(b"/healthz", b"/slow") + b"\r\n" + GET + b"x: " + b"x" * 200_000 + b"\r\n\r\n")
        assert b"431" not in all_from(line)
