"""The one way out: the model endpoint, and nothing beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from palestra.sandbox import EndpointProxy
from tests.sandbox.conftest import Box

NewBox = Callable[..., Box]

ASK = """
import os, urllib.request
headers = {"Authorization": "Bearer " + os.environ["KEY"]}
request = urllib.request.Request(os.environ["URL"] + "/models", headers=headers)
print(urllib.request.urlopen(request, timeout=10).read().decode())
"""


class Endpoint(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f"{self.path} {self.headers['Authorization']}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def test_the_endpoint_is_reached_with_the_episodes_key_and_nothing_else_is(new_box: NewBox, endpoint: str) -> None:
    proxy = EndpointProxy(endpoint, port=8123)
    box = new_box(endpoint_proxy=proxy, env={"URL": proxy.inside_url, "KEY": "episode-1"})
    assert proxy.inside_url == "http://127.0.0.1:8123/v1"
    assert box.python(ASK).text == "/v1/models Bearer episode-1\n"
    straight = box.python(ASK, env={"URL": endpoint})
    assert "Connection refused" in straight.stderr.decode()


def test_every_sandbox_has_an_endpoint_proxy_of_its_own(new_box: NewBox, endpoint: str) -> None:
    proxy = EndpointProxy(endpoint)
    boxes = [new_box(endpoint_proxy=proxy, env={"URL": proxy.inside_url, "KEY": f"key-{place}"}) for place in range(2)]
    assert [box.python(ASK).text for box in boxes] == ["/v1/models Bearer key-0\n", "/v1/models Bearer key-1\n"]


def test_an_endpoint_that_is_down_is_a_closed_connection(new_box: NewBox) -> None:
    proxy = EndpointProxy("http://127.0.0.1:9/v1")
    box = new_box(endpoint_proxy=proxy, env={"URL": proxy.inside_url, "KEY": ""})
    assert box.python(ASK).status == 1
    assert box.sh("echo alive").text == "alive\n"


@pytest.mark.parametrize("url", ["https://example.com", "ftp://x", "127.0.0.1:80", "http://"])
def test_an_endpoint_proxy_leads_to_http(url: str) -> None:
    with pytest.raises(ValueError, match="http://"):
        EndpointProxy(url)
