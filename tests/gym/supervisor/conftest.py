"""Gyms as people start them: `palestra gym run` in a process of its own.

def test_x(gym): ...                       one gym for all tests, with a server of every kind; may be broken, comes back
def test_y(start_gym): start_gym(...)      one of the test's own; ended after it
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

PATIENCE_S = 30.0

OURS = """
import os

from palestra.gym.errors import GymConfigError
from palestra.gym.records import ServerKind
from palestra.gym.servers.base import GymServer
from palestra.gym.wire import GymResponse, GymRequest

from .words import GREETING


class Counter(GymServer):
    kind = ServerKind.RESOURCES

    async def open(self) -> None:
        if self.instance.settings.get("is_bad"):
            raise GymConfigError("is_bad: should be false")
        print(GREETING, self.name)

    async def answer(self, call: GymRequest) -> GymResponse:
        return GymResponse(body={"name": self.name, "pid": os.getpid()})
"""
STOCK = """
try:
    import nemo_gym
except ImportError:
    nemo_gym = None
import http.server, os, socket, subprocess, sys, yaml

name = os.environ["NEMO_GYM_CONFIG_PATH"]
settings = yaml.safe_load(os.environ["NEMO_GYM_CONFIG_DICT"])[name]["resources_servers"]["foreign"]
if settings.get("is_bad"):
    sys.exit("this world is not for me")
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f'{{"helper": {helper.pid}, "cwd": "{os.getcwd()}"}}'.encode())

    def log_message(self, *said):
        pass


server = http.server.ThreadingHTTPServer(("", 0), Handler, bind_and_activate=False)
server.socket.close()
server.socket = socket.socket(fileno=int(os.environ["PALESTRA_GYM_SOCKET"]))
server.socket.setblocking(True)
server.serve_forever()
"""
AGENT = "responses_api_agents/simple_agent/configs/simple_agent.yaml"
MODEL = "responses_api_models/vllm_model/configs/vllm_model.yaml"
ALL = f"""
config_paths: [{MODEL}, {AGENT}]
counter: {{resources_servers: {{counter: {{entrypoint: app.py, domain: other}}}}}}
lone: {{resources_servers: {{counter: {{entrypoint: app.py, domain: other, isolation: process}}}}}}
foreign: {{resources_servers: {{foreign: {{entrypoint: app.py, domain: other}}}}}}
simple_agent: {{responses_api_agents: {{simple_agent: {{resources_server: {{name: counter}}}}}}}}
policy_base_url: http://127.0.0.1:9/v1
policy_api_key: sk-quite-secret
policy_model_name: any
gym: {{probe_interval_s: 0.2, probe_timeout_s: 1, probe_failures: 2, admin_key: tml-of-the-tests}}
model_endpoint_readiness_timeout_seconds: 0
"""
ONE = "foreign: {resources_servers: {foreign: {entrypoint: app.py, domain: other}}}"


@pytest.fixture(scope="session")
def gym_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Server folders and configs."""
    root = tmp_path_factory.mktemp("gym-root")
    for name, code in (("counter", OURS), ("foreign", STOCK)):
        folder = root / "resources_servers" / name
        folder.mkdir(parents=True)
        (folder / "app.py").write_text(code)
        (folder / "requirements.txt").write_text("-e nemo-gym[dev] @ ../../\n")
    (root / "resources_servers/counter/words.py").write_text('GREETING = "hello from"\n')
    (root / "all.yaml").write_text(ALL)
    (root / "one.yaml").write_text(ONE)
    return root


def is_alive(process: psutil.Process) -> bool:
    """One that nobody waits for stays a zombie where the machine's first process is a lazy one."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def still_alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """After some patience."""
    until = time.monotonic() + PATIENCE_S
    while (left := [one for one in processes if is_alive(one)]) and time.monotonic() < until:
        time.sleep(0.02)
    return left


class RunningGym:
    def __init__(self, root: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "palestra.cli", "gym", "run", *arguments],
            cwd=root,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._news: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.head = ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._news.put(line.rstrip("\n"))
        self._news.put(None)

    def hear(self, wanted: str) -> str:
        """The next line with these words; fails where the gym ends before."""
        while True:
            line = self._news.get(timeout=PATIENCE_S)
            assert line is not None, f"no {wanted!r} in: " + "\n".join(self.lines)
            self.lines.append(line)
            if wanted in line:
                return line

    def start(self) -> RunningGym:
        self.head = self.hear("The head is at ").split()[4].rstrip(";")
        self.hear("servers ready!")
        return self

    def rest(self) -> str:
        """Everything it said, once it ended."""
        while (line := self._news.get(timeout=PATIENCE_S)) is not None:
            self.lines.append(line)
        return "\n".join(self.lines)

    def get(self, path: str, base: str | None = None, **headers: str) -> Any:
        request = urllib.request.Request(f"{base or self.head}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.load(answer)

    def post(self, name: str, path: str) -> Any:
        url = f"{self.instance(name)['url']}{path}"
        request = urllib.request.Request(url, b"{}", {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.load(answer)

    def instance(self, name: str) -> Any:
        return next(one for one in self.get("/server_instances") if one["process_name"] == name)

    def until_healthy(self, name: str, restarts: int) -> Any:
        """After as many restarts."""
        until = time.monotonic() + PATIENCE_S
        while True:
            found = self.instance(name)
            if found["restarts"] >= restarts and found["state"] == "healthy":
                return found
            assert time.monotonic() < until, f"{name} did not come back: {found}\n" + "\n".join(self.lines)
            time.sleep(0.02)

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(PATIENCE_S)


@pytest.fixture(scope="session")
def gym(gym_root: Path) -> Iterator[RunningGym]:
    running = RunningGym(gym_root, "-c", "all.yaml", "head_server.port=0")
    try:
        yield running.start()
    finally:
        running.end()


@pytest.fixture
def start_gym(gym_root: Path) -> Iterator[Callable[..., RunningGym]]:
    made: list[RunningGym] = []

    def start(*arguments: str) -> RunningGym:
        made.append(RunningGym(gym_root, *arguments, "head_server.port=0"))
        return made[-1]

    yield start
    for one in made:
        one.end()
