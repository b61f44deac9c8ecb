"""What a server reads of requests before it knows whose they are: on each of its ports, and behind a proxy."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.net.attacks import FAR_LESS_THAN_ALL, check_bounds, is_healthy, long_body, long_url, many_headers, send
from tests.ports import free_port
from tests.server.nginx import nginx

NGINX = """
  client_max_body_size 0; client_header_buffer_size 512k; large_client_header_buffers 4 512k; lingering_close off;
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass {url}; proxy_http_version 1.1; proxy_request_buffering off;
      proxy_set_header Host $http_host; proxy_set_header X-Forwarded-For $remote_addr;
    }}
  }}
"""


def test_heads_and_bodies_are_bounded(server: Any) -> None:
    check_bounds(server.port)


@pytest.mark.parametrize("path", ["/api/v1/create_session", "/api/v1/forward_backward", "/v1/chat/completions"])
def test_a_body_beyond_the_limit_is_refused_by_its_length(server: Any, path: str) -> None:
    sent = send(server.port, long_body(path))
    assert (sent.status, sent.size < FAR_LESS_THAN_ALL) == (413, True), sent.answer


@pytest.mark.e2e
def test_the_port_for_agentjets_clients_has_the_same_bounds(make_server: Callable[..., Any]) -> None:
    server = make_server("tinkerscript.enabled=true", "tinkerscript.port=0", "limits.head_timeout_s=1")
    port = urlsplit(server.said().partition("TinkerScript at ")[2].split()[0]).port
    assert port not in (None, server.port)
    for one in (server.port, port):
        check_bounds(one)
        with socket.create_connection(("127.0.0.1", one), timeout=60) as slow:
            slow.sendall(b"GET /healthz HTTP/1.1\r\nhost: lo")
            assert slow.recv(1 << 16).startswith(b"HTTP/1.1 408 ")


@pytest.mark.e2e
def test_behind_a_proxy_it_is_the_same(make_server: Callable[..., Any], tmp_path: Path) -> None:
    server, port = make_server(), free_port()
    with nginx(tmp_path, NGINX.format(port=port, url=server.url), port):
        assert is_healthy(port)
        for head in (many_headers(900), long_url()):  # nginx itself takes no more than 1000
            assert send(port, head).status == 431
        for path in ("/healthz", "/api/v1/forward_backward"):
            sent = send(port, long_body(path))
            assert (sent.status, sent.size < FAR_LESS_THAN_ALL) == (413, True)
        attacks = [threading.Thread(target=send, args=(port, long_body())) for _ in range(8)]
        for attack in attacks:
            attack.start()
        while any(attack.is_alive() for attack in attacks):
            assert is_healthy(port)
