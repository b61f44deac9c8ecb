"""How long clients wait when the active server is killed and its standby takes over.

    python benchmarks/takeover.py --database postgresql://palestra@/empty_database
    python benchmarks/takeover.py --database … --model my-model --rounds 5

Two `palestra serve --standby` with state folders of their own share the database and a folder for snapshots and
checkpoints. A client trains a model; in each round the active server and its engine are killed with SIGKILL, and the
clock runs until the other server's /readyz answers 200, and until the next training step is done. The killed server is
then started again as the standby.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
from harness import Measure, Report, Row, argument_parser, machine, report, versions

STEPS = 5  # between two kills
WAIT_S = 300.0
TARGET_S = 20.0


@dataclass
class StandbyServer:
    folder: Path
    port: int
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    preloaded: int = 0
    """How often it had preloaded before its last start."""

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.preloaded += self.has_preloaded()
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, cwd=self.folder)

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/readyz", trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def has_preloaded(self) -> bool:
        """Whether its engine has loaded the model, and waits."""
        logs = "".join(file.read_text() for file in self.folder.glob("state/logs/*.log"))
        return logs.count("event=preloaded") > self.preloaded

    def kill(self) -> None:
        """The server and its engine, as a machine that is gone."""
        if self.process is None or self.process.poll() is not None:
            return
        workers = [json.loads(file.read_text())["pid"] for file in self.folder.glob("state/worker-*/worker.json")]
        for pid in (self.process.pid, *workers):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


class TrainingClient:
    """A client by plain HTTP, whose pauses are the server's alone: the SDK adds its own."""

    def __init__(self) -> None:
        self.http = httpx.Client(timeout=60.0, trust_env=False)
        self.number = 0
        self.model_id = ""

    def call(self, port: int, name: str, **body: object) -> dict[str, object]:
        return self.http.post(f"http://127.0.0.1:{port}/api/v1/{name}", json=body).raise_for_status().json()

    def result(self, port: int, request_id: object) -> None:
        while "error" not in (done := self.call(port, "retrieve_future", request_id=request_id)):
            if done.get("type") != "try_again":
                return
        raise SystemExit(f"a request failed: {done}")

    def create(self, port: int, base_model: str) -> None:
        session = self.call(port, "create_session", tags=[], sdk_version="0.36.0")["session_id"]
        made = self.call(
            port,
            "create_model",
            session_id=session,
            model_seq_id=0,
            base_model=base_model,
            lora_config={"rank": 16, "seed": 1},
        )
        self.result(port, made["request_id"])
        self.model_id = str(made["model_id"])

    def step(self, port: int) -> None:
        tokens = list(range(10, 74))
        inputs = {
            "target_tokens": {"data": tokens[1:], "dtype": "int64"},
            "weights": {"data": [1.0] * 63, "dtype": "float32"},
        }
        datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens[:-1]}]}, "loss_fn_inputs": inputs}
        sent = []
        for name, body in (
            ("forward_backward", {"forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"}}),
            ("optim_step", {"adam_params": {"learning_rate": 1e-4}}),
        ):
            self.number += 1
            sent.append(self.call(port, name, model_id=self.model_id, seq_id=self.number, **body))
        for one in sent:
            self.result(port, one["request_id"])


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {WAIT_S:g} s for {what}")
        time.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def main() -> None:
    parser = argument_parser("takeover", "How long clients wait when a standby takes over.")
    parser.add_argument("--database", required=True, help="an empty PostgreSQL database")
    parser.add_argument("--model", default="ephebe", help="a model's folder, or the bundled ephebe")
    options = parser.parse_args()
    name, rounds = Path(options.model).name, options.rounds or (2 if options.quick else 5)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = []
        for number in range(2):
            folder, port = root / f"server-{number}", free_port()
            command = [sys.executable, "-m", "palestra.cli", "serve", "--standby", "--port", str(port)]
            command += ["--model", options.model, "--name", name, "--state", str(folder / "state")]
            command += ["--database", options.database, "journal=database"]
            command += [f"snapshots=file://{root}/snapshots", f"checkpoints=file://{root}/checkpoints"]
            servers.append(StandbyServer(folder, port, command))
            stack.callback(servers[-1].kill)
        active, standby = servers
        active.start()
        until(active.is_ready, "the first server")
        client = TrainingClient()
        client.create(active.port, name)
        ready_s, trained_s = [], []
        for _ in range(rounds):
            standby.start()
            until(standby.has_preloaded, "the standby")
            for _ in range(STEPS):
                client.step(active.port)
            killed_at = time.monotonic()
            active.kill()
            until(standby.is_ready, "the takeover")
            ready_s.append(time.monotonic() - killed_at)
            client.step(standby.port)
            trained_s.append(time.monotonic() - killed_at)
            active, standby = standby, active
    rows = [
        Row("kill to ready", "s", Measure(tuple(ready_s)), target_value=TARGET_S, less_is_better=True),
        Row("kill to the next training step", "s", Measure(tuple(trained_s)), less_is_better=True),
    ]
    report(Report("takeover", machine(), versions(["palestra", "psycopg", "torch"]), rows), json_line=options.json)


if __name__ == "__main__":
    main()
