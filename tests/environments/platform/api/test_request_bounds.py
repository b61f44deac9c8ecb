"""What a platform reads of requests before it knows whose they are."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import pytest

from tests.environments.platform.api.conftest import KEY, Platform
from tests.net.attacks import FAR_LESS_THAN_ALL, check_bounds, long_chunks, send


@pytest.fixture(scope="module")
def port(platform: Platform) -> int:
    return urlsplit(platform.url).port or 0


def test_heads_and_bodies_are_bounded(port: int) -> None:
    check_bounds(port)


def test_of_a_call_to_an_instance_that_is_not_there_little_is_read(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as line:
        line.sendall(b"POST /i/nowhere/mcp HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n")
        assert line.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


def test_a_body_in_parts_is_read_up_to_its_limit(port: int) -> None:
    sent = send(port, long_chunks("/v1/tasks", 600_000_000, f"authorization: Bearer {KEY}"))
    assert (sent.status, sent.size < FAR_LESS_THAN_ALL) == (413, True)
