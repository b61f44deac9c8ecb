"""A platform on a real socket, in this process, so that tests can look at its pool, too."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from palestra.environments.platform.api.app import PlatformApp
from palestra.environments.platform.api.auth import PlatformAuth
from palestra.environments.platform.pool import InstancePool
from palestra.environments.platform.pool_records import PoolLimits
from palestra.net.serving import HttpServer

KEY = "key-of-the-tests"


class Platform:
    def __init__(self, pool: InstancePool, url: str) -> None:
        self.pool, self.url = pool, url
        self.http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=30)
        self.stranger = httpx.Client(base_url=url, timeout=30)
        """Without a key."""

    def make(self, **fields: Any) -> dict[str, Any]:
        answer = self.http.post("/v1/env/instances", json={"env_key": "keys", **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def mcp(
        self, instance_id: str, method: str, params: Any = None, path: str = "mcp", **headers: str
    ) -> httpx.Response:
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}}
        return self.stranger.post(f"/i/{instance_id}/{path}", json=message, headers=headers)

    def call(self, instance_id: str, tool: str, arguments: Any, path: str = "mcp") -> dict[str, Any]:
        answer = self.mcp(instance_id, "tools/call", {"name": tool, "arguments": arguments}, path)
        assert answer.status_code == 200, answer.text
        return answer.json()["result"]

    def runner(self, instance_id: str, path: str, body: Any = None, method: str = "POST") -> httpx.Response:
        return self.http.request(method, f"/i/{instance_id}/api/v1/env/{path}", json=body)


def started(pool: InstancePool, auth: PlatformAuth) -> Iterator[str]:
    yield from serving(PlatformApp(pool, auth))


def serving(app: Any) -> Iterator[str]:
    server = HttpServer(app, port=0, log_level="warning", timeout_keep_alive=75)
    thread = threading.Thread(target=server.run, daemon=True)
    up = threading.Event()

    async def startup(sockets: Any = None) -> None:
        await HttpServer.startup(server, sockets)
        up.set()

    server.startup = startup  # type: ignore[method-assign]
    thread.start()
    assert up.wait(30)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(30)


@pytest.fixture(scope="session")
def platform() -> Iterator[Platform]:
    with InstancePool(PoolLimits()) as pool:
        for url in started(pool, PlatformAuth(secret=b"of the tests")):
            yield Platform(pool, url)
