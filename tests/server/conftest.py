"""Real servers for tests: `palestra serve` as a child process, killed, restarted and stopped on demand.

    def test_x(server): ...                  the shared one, never killed
    def test_y(service_client): ...          an SDK client of the shared one
    def test_z(make_server):                 one of its own
        server = make_server("gap_wait_s=1", require_key="always")
        server.kill(); server.start()        # same state, same port

When a test fails, the ends of the logs of every server that lives are shown with it.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
from click.testing import CliRunner

from tests.waiting import PATIENCE_S, until
from tests.warm_start import WarmProcess, start_palestra

if TYPE_CHECKING:
    import tinker

os.environ["TINKER_TELEMETRY"] = "0"

READY = "Palestra is ready at "
NAME = "Qwen/Qwen3-8B"
WORKER = "worker-Qwen_Qwen3-8B"
KEY = "tml-test"
START_S = STOP_S = 100.0  # on a busy machine
TAIL = 6000  # characters of each log shown with a failure

_living: list[Server] = []
_names = itertools.count()


class Server:
    """A `palestra serve` with a state folder of its own. Not started yet; a context manager that leaves nothing."""

    name, key, worker = NAME, KEY, WORKER
    device = "cpu"

    def __init__(self, folder: Path, model: Path, *overrides: str, flags: tuple[str, ...] = (), **settings: Any):
        self.folder, self.model = folder, model
        self.state, self.checkpoints = folder / "state", folder / "state" / "checkpoints"
        self.log, self.worker_log = folder / "server.log", self.state / "logs" / f"{self.worker}.log"
        self.overrides = [*overrides, *(f"{name}={json.dumps(value)}" for name, value in settings.items())]
        self.flags = list(flags)
        self.url, self.port = "", 0
        self.process: WarmProcess | None = None
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._seen: dict[int, psutil.Process] = {}
        """Every process that was ever ours."""
        self._clients: dict[tuple[str, str | None], httpx.Client] = {}
        folder.mkdir(parents=True, exist_ok=True)

    # Living

    def sabotage(self, code: str) -> None:
        """Workers started from now on run this first, as the interpreter's sitecustomize; the product has no hook."""
        folder = self.folder / "sabotage"
        folder.mkdir(exist_ok=True)
        only_workers = "import os\nif 'PALESTRA_WORKER' in os.environ:\n"
        (folder / "sitecustomize.py").write_text(only_workers + textwrap.indent(textwrap.dedent(code), "    "))
        before = self.environment.get("PYTHONPATH", "")
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), before)))

    def launch(self) -> None:
        """Does not wait. The first start takes a free port, later ones the same again."""
        assert self.process is None or self.process.poll() is not None, "it runs already"
        args = [
            "serve",
            "--model",
            str(self.model),
            "--name",
            self.name,
            "--port",
            str(self.port),
            "--device",
            self.device,
        ]
        with self.log.open("ab") as out:
            self._log_start = out.tell()
            self.process = start_palestra(
                *(*args, "--state", str(self.state), *self.flags, *self.overrides),
                output=out,
                cwd=self.folder,
                env=self.environment,
            )
        self._seen[self.process.pid] = psutil.Process(self.process.pid)
        if self not in _living:
            _living.append(self)

    def start(self) -> Server:
        """Returns when it is ready."""
        self.launch()
        self.wait_ready()
        return self

    def wait_ready(self, timeout_s: float = START_S) -> None:
        def is_ready() -> bool:
            code = self.process.poll() if self.process else None
            assert code is None, f"the server ended with {code}:\n{self.tail()}"
            return READY in self.said()

        self.until(is_ready, timeout_s=timeout_s)
        self.url = self.said().partition(READY)[2].split()[0].rstrip(".,")
        self.port = int(self.url.rpartition(":")[2])
        self._note_processes()

    def said(self) -> str:
        """Its output since the last start."""
        return self.log.read_bytes()[self._log_start :].decode(errors="replace")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def worker_pid(self) -> int:
        """Of the first worker. A new one has another: see `wait_worker`."""
        return json.loads((self.state / self.worker / "worker.json").read_text())["pid"]

    def wait_worker(self, *, other_than: int = 0, timeout_s: float = START_S) -> int:
        """Until the engine is there, and is not this old process."""

        def is_there() -> bool:
            return self.worker_pid != other_than and self.http().get("/readyz").status_code == 200

        self.until(is_there, timeout_s=timeout_s)
        self._note_processes()
        return self.worker_pid

    def until(self, is_true: Callable[[], bool], *, timeout_s: float = PATIENCE_S) -> None:
        until(is_true, timeout_s=timeout_s, details=self.tail)

    # Dying

    def kill(self) -> None:
        """SIGKILL to the server; its worker lives on."""
        assert self.process is not None
        self._note_processes()
        self.process.kill()
        self.process.wait()

    def kill_worker(self) -> int:
        """SIGKILL to the engine; returns the pid it had. The server starts another by itself."""
        self._note_processes()
        pid = self.worker_pid
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_both(self) -> None:
        self._note_processes()
        worker = psutil.Process(self.worker_pid)
        self.kill()
        worker.kill()
        self._wait_gone([worker])

    def restart(self) -> None:
        """Kills the server, unless it is dead already, and starts it again."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self.start()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """As a user does; returns the exit status once nothing of it is left."""
        assert self.process is not None
        self._note_processes()
        self.process.send_signal(number)
        try:
            code = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the server did not stop within {STOP_S} s:\n{self.tail()}")
        left = self.left_processes()
        assert not left, f"left behind: {left}\n{self.tail()}"
        return code

    def left_processes(self) -> list[str]:
        return [f"{p.pid} {' '.join(p.cmdline()[:4])}" for p in self._seen.values() if _is_alive(p)]

    def end(self) -> None:
        """Whatever state it is in, nothing stays."""
        self._note_processes()
        for process in self._seen.values():
            if _is_alive(process):
                process.kill()
        if self.process is not None:
            self.process.wait()
        self._wait_gone(list(self._seen.values()))
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        if self in _living:
            _living.remove(self)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _note_processes(self) -> None:
        found: list[psutil.Process] = []
        try:
            found += psutil.Process(self.pid).children(recursive=True)
        except (psutil.Error, AssertionError):
            pass
        for file in self.state.glob("worker-*/**/worker.json"):
            try:
                facts = json.loads(file.read_text())
                process = psutil.Process(facts["pid"])
                if abs(process.create_time() - facts["created"]) < 1:
                    found.append(process)
            except (OSError, ValueError, KeyError, psutil.Error):
                continue
        self._seen.update({process.pid: process for process in found})

    def _wait_gone(self, processes: list[psutil.Process]) -> None:
        until(lambda: not any(_is_alive(p) for p in processes), details=lambda: str(processes))

    # Talking to it

    def client(self, *, key: str = KEY, **options: Any) -> tinker.ServiceClient:
        import tinker

        return tinker.ServiceClient(base_url=self.url, api_key=key, **options)

    def rest(self, *, key: str = KEY) -> tinker.RestClient:
        import tinker

        return tinker.RestClient(base_url=self.url, api_key=key)

    def http(self, *, key: str | None = KEY) -> httpx.Client:
        """Plain HTTP: `server.http().get("/api/v1/sessions")`."""
        if (self.url, key) not in self._clients:
            headers = {} if key is None else {"X-API-Key": key}
            # Without `verify` it does not read the system's certificates, which takes longer than most tests.
            self._clients[self.url, key] = httpx.Client(
                base_url=self.url, headers=headers, timeout=60.0, verify=False, trust_env=False
            )
        return self._clients[self.url, key]

    def make_key(self, name: str, *options: str, owner: str | None = None, right: str = "trainer") -> str:
        """As `palestra key create` beside the running server, which knows it two seconds later at the latest."""
        from palestra.cli import main

        args = ["key", "create", "--name", name, "--right", right, "--state", str(self.state), "--json"]
        result = CliRunner().invoke(main, [*args, "--owner", owner or name, *options])
        assert result.exit_code == 0, result.output
        return json.loads(result.output)["key"]

    def tinker(self, *args: str, key: str = KEY, check: bool = True) -> subprocess.CompletedProcess[str]:
        """The `tinker` command line: `server.tinker("run", "list")`."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        response = {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": key, "HOME": str(home)}
        command = [str(Path(sys.executable).with_name("tinker")), *args]
        done = subprocess.run(
            command,
            env=os.environ | response,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        if check:
            assert done.returncode == 0, f"tinker {' '.join(args)}: {done.stdout}{done.stderr}"
        return done

    def metrics(self) -> str:
        return self.http().get("/metrics").text

    def tail(self) -> str:
        logs = [self.log, *sorted(self.state.glob("logs/*.log"))]
        return "\n".join(f"--- {f}\n{f.read_text(errors='replace')[-TAIL:]}" for f in logs if f.exists())


def created(client: Any) -> Any:
    """From 0.38 on the SDK returns a future of a client."""
    return client.result() if hasattr(client, "result") else client


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.failed and {"server", "make_server", "make_module_server"} & set(getattr(item, "fixturenames", ())):
        report.sections += [(f"server at {server.url}", server.tail()) for server in _living]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, micro_model: Path) -> Iterator[Server]:
    """One for all tests of this process: do not kill it, and expect others' sessions in it."""
    with Server(tmp_path_factory.mktemp("server"), micro_model) as server:
        yield server.start()


@pytest.fixture
def service_client(server: Server) -> Iterator[tinker.ServiceClient]:
    client = server.client()
    yield client
    client.close("success").result()


@pytest.fixture
def rest_client(server: Server) -> tinker.RestClient:
    return server.rest()


@pytest.fixture
def make_server(tmp_path: Path, micro_model: Path) -> Iterator[Callable[..., Server]]:
    """`make_server("key=value", setting=value, flags=("--host", ...))`: started, unless `start=False`."""
    yield from _factory(tmp_path, micro_model)


@pytest.fixture(scope="module")
def make_module_server(tmp_path_factory: pytest.TempPathFactory, micro_model: Path) -> Iterator[Callable[..., Server]]:
    """The same for a fixture of a whole module."""
    yield from _factory(tmp_path_factory.mktemp("servers"), micro_model)


def _factory(folder: Path, micro_model: Path) -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def make(*overrides: str, start: bool = True, model: Path | None = None, **options: Any) -> Server:
        made.append(Server(folder / f"server{next(_names)}", model or micro_model, *overrides, **options))
        return made[-1].start() if start else made[-1]

    yield make
    for server in made:
        server.end()
