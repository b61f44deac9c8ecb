"""OpenEnv's client at its own server, with one MCP tool, or at ours; to be run by a Python that has `openenv`.

.venv-openenv/bin/python benchmarks/peers/openenv_peer.py SECONDS              # prints one object of JSON
.venv-openenv/bin/python benchmarks/peers/openenv_peer.py SECONDS URL PID      # of a server that runs already
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from fastmcp import FastMCP  # pyright: ignore[reportMissingImports]
from openenv.core.env_server import create_app  # pyright: ignore[reportMissingImports]
from openenv.core.env_server.mcp_environment import MCPEnvironment  # pyright: ignore[reportMissingImports]
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation  # pyright: ignore[reportMissingImports]
from openenv.core.env_server.types import Observation, State  # pyright: ignore[reportMissingImports]
from openenv.core.mcp_client import MCPToolClient  # pyright: ignore[reportMissingImports]

ROUNDS = 3
PER_SESSION = 500  # calls: our list of numbers has room for a thousand


class Numbers(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("peer")
        numbers: list[int] = []

        @server.tool
        def put(value: int) -> dict[str, Any]:
            """Write a number down."""
            numbers.append(value)
            return {"put": value}

        super().__init__(server)

    def reset(self, seed: Any = None, episode_id: Any = None, **_: Any) -> Observation:
        return Observation(done=False, reward=0.0)

    def _step_impl(self, action: Any, timeout_s: Any = None, **_: Any) -> Observation:
        return Observation(done=False, reward=0.0)

    @property
    def state(self) -> State:
        return State()


def serve() -> None:
    app = create_app(Numbers, CallToolAction, CallToolObservation, env_name="numbers", max_concurrent_envs=64)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False))
    threading.Thread(target=lambda: (sys.stdin.read(), setattr(server, "should_exit", True)), daemon=True).start()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    server.run(sockets=[listener])


def measure(url: str, seconds: float, cpu_s: Callable[[], float]) -> dict[str, Any]:
    """Of the server's CPU: what a call waits for is the line between them as much as the server."""
    cpu_ms: list[float] = []
    for _ in range(ROUNDS):
        calls, began, until = 0, cpu_s(), time.perf_counter() + seconds
        while time.perf_counter() < until:
            calls += one_session(url, until)
        cpu_ms.append(1000 * (cpu_s() - began) / calls)
    return {"server_cpu_ms": cpu_ms}


def one_session(url: str, until: float) -> int:
    """Calls that were made. Without a reset: a task would end after a few of them."""
    calls = 0
    with MCPToolClient(base_url=url).sync() as client:
        while time.perf_counter() < until and calls < PER_SESSION:
            assert client.call_tool("put", value=3) == {"put": 3}
            calls += 1
    return calls


def cpu_of(pid: int) -> float:
    """User and system time, as Linux counts them."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(seconds: float, url: str = "", pid: str = "") -> None:
    """The server has a process of its own."""
    if url:
        print(json.dumps(measure(url, seconds, lambda: cpu_of(int(pid)))))
        return
    command = [sys.executable, __file__, "serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        url = server.stdout.readline().strip()
        wait_for(url)
        print(json.dumps(measure(url, seconds, lambda: cpu_of(server.pid))))
        server.stdin.close()


def wait_for(url: str) -> None:
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.1)


serve() if sys.argv[1] == "serve" else main(float(sys.argv[1]), *sys.argv[2:])
