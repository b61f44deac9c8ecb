"""Many samples in flight and many idle sessions, through the official SDK, against a server whose engine is fake.

    python benchmarks/load.py --quick
    python benchmarks/load.py --rows samples --samples 131072 --clients 8
    python benchmarks/load.py --rows sessions --sessions 2000 --seconds 60

Owns: the rows, their checks and targets. Never touches: requests (`peers/load_client.py`), the engine
(`peers/fake_engine.py`), processes of the server (`peers/tinker_server.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from harness import Measure, Progress, Report, Row, argument_parser, machine, positive, report, some_of, versions
from peers.fake_engine import Tally, fake_engine, open_gate
from peers.tinker_server import Metrics, OurServer, Processes, make_model, our_server

PACKAGES = ("palestra", "tinker", "uvicorn")
ROWS = ("samples", "refusal", "sessions")
CLIENT = Path(__file__).parent / "peers" / "load_client.py"
CHEAP_EVERY_S = 0.1
PATIENCE_S = 1800.0
SETTLE_S = 12  # until every session has sent its first heartbeat
SESSIONS_A_CLIENT = 250  # each has connections of its own, and a process may open so many files


class LoadError(Exception):
    """A sample was lost, doubled or answered wrongly, or a process did not do its part."""


@dataclass(slots=True)
class CheapCalls:
    """Times a short call again and again, each after the last one, in a thread of its own."""

    url: str
    key: str
    seconds: list[float] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with httpx.Client(base_url=self.url, headers={"X-API-Key": self.key}, timeout=60) as client:
            while not self._ended.wait(CHEAP_EVERY_S):
                started = time.perf_counter()
                client.get("/api/v1/get_server_capabilities").raise_for_status()
                self.seconds.append(time.perf_counter() - started)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def quantile(self, share: float) -> float:
        return sorted(self.seconds)[min(len(self.seconds) - 1, int(share * len(self.seconds)))]


@dataclass(slots=True)
class Client:
    """A process of `load_client.py`."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls, *args: str | int) -> Client:
        command = [sys.executable, str(CLIENT), *map(str, args)]
        return cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise LoadError(f"a client ended with {self.process.wait()}")
        return json.loads(line)

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def clients_of(*commands: tuple[str | int, ...]) -> Iterator[list[Client]]:
    clients = [Client.start(*command) for command in commands]
    try:
        for client in clients:
            client.hear()
        yield clients
    finally:
        for client in clients:
            client.end()


@dataclass(slots=True)
class Bench:
    args: argparse.Namespace
    model: Path
    scratch: Path
    progress: Progress
    notes: list[str]

    @contextlib.contextmanager
    def server(self, name: str, *settings: str) -> Iterator[LoadedServer]:
        """It listens at every address, so that clients can call it at several, and therefore wants a key."""
        state, engine = self.scratch / name, self.scratch / f"{name}-engine"
        command = [str(self.args.palestra), "key", "create", "--name", "load", "--right", "admin", "--json"]
        command += ["--state", str(state)]
        made = subprocess.run(command, check=True, capture_output=True, text=True)
        os.environ["TINKER_API_KEY"] = json.loads(made.stdout)["key"]
        settings = ("host=0.0.0.0", *settings)
        with our_server(self.args.palestra, self.model, state, *settings, environment=fake_engine(engine)) as server:
            yield LoadedServer(server, int(server.url.rpartition(":")[2]), engine, os.environ["TINKER_API_KEY"])

    def commands(self, server: LoadedServer, count: int) -> list[tuple[str | int, ...]]:
        n = self.args.clients
        shares = [count * i // n for i in range(n + 1)]
        return [
            ("samples", server.url(i + 1), low, high - low, self.args.prompt_tokens, self.args.group)
            for i, (low, high) in enumerate(itertools.pairwise(shares))
        ]

    def samples(self) -> list[Row]:
        """All of them wait in the server at once; then the engine answers, and every answer is checked."""
        count, started = self.args.samples, time.perf_counter()
        with self.server("samples", f"limits.max_pending_samples={count}") as server:
            with clients_of(*self.commands(server, count)) as clients:
                before, cheap = server.memory(), CheapCalls(server.url(1), server.key)
                with cheap.running():
                    started, cpu = time.perf_counter(), server.processes.own_cpu_s()
                    for client in clients:
                        client.go()
                    self.until(
                        lambda: server.tally().received >= count, lambda: f"{server.tally().received:,} in flight"
                    )
                    sent_s, connections = time.perf_counter() - started, server.connections()
                    server.check_waiting(count)
                    full = server.memory()
                    open_gate(server.engine)
                    found = [client.hear() for client in clients]
                    took, cpu = time.perf_counter() - started, server.processes.own_cpu_s() - cpu
                check_answers(found, count)
                after = server.memory()
            tally = server.tally()
        peak = sum(one["peak_bytes"] for one in found)
        self.notes.append(
            f"{count:,} samples of {self.args.prompt_tokens} prompt tokens from {len(found)} client processes, all in "
            f"flight after {sent_s:.0f} s, with {connections} connections; server {before / 1e6:.0f} MB before, "
            f"{full / 1e6:.0f} MB with all, {after / 1e6:.0f} MB after; clients {peak / 1e9:.1f} GB and "
            f"{sum(one['cpu_s'] for one in found):.0f} s of CPU; {len(cheap.seconds)} cheap calls, the slowest "
            f"{max(cheap.seconds):.2f} s"
        )
        return [
            row("samples in flight, all answered once", "samples", count, target=count, less=False),
            row("samples that the engine got twice", "samples", tally.received - tally.distinct, target=0),
            row("server memory a pending sample", "bytes", (full - before) / count),
            row("cheap call meanwhile, p50", "s", cheap.quantile(0.5)),
            row("cheap call meanwhile, p99", "s", cheap.quantile(0.99), target=1.0),
            row("server CPU a sample", "ms", 1000 * cpu / count),
            row("time until all are answered", "s", took),
        ]

    def refusal(self) -> list[Row]:
        """Four times as many as are allowed to wait: the rest is refused at first, and gets through."""
        count = min(self.args.samples, 1000)
        with self.server("refusal", f"limits.max_pending_samples={count // 4}") as server:
            with clients_of(*self.commands(server, count)) as clients:
                for client in clients:
                    client.go()
                self.until(lambda: server.refused() > 0, lambda: "waiting for a refusal")
                server.check_waiting(count // 4)
                open_gate(server.engine)
                check_answers([client.hear() for client in clients], count)
            refused = server.refused()
        self.notes.append(f"refusal: at most {count // 4} of {count} samples may wait; {refused:.0f} answers were 429")
        return [row("beyond the limit, all answered once", "samples", count, target=count, less=False)]

    def sessions(self) -> list[Row]:
        """Idle sessions send heartbeats every ten seconds, each over connections of its own."""
        count = self.args.sessions
        n = -(-count // SESSIONS_A_CLIENT)
        with self.server("sessions") as server:
            before = server.memory()
            commands = [("sessions", server.url(i + 1), count * (i + 1) // n - count * i // n) for i in range(n)]
            with clients_of(*commands):
                time.sleep(SETTLE_S)
                cpu, started = server.processes.own_cpu_s(), time.perf_counter()
                time.sleep(self.args.seconds)
                share = 100 * (server.processes.own_cpu_s() - cpu) / (time.perf_counter() - started)
                full, connections = server.memory(), server.connections()
        self.notes.append(
            f"{count:,} sessions with {connections} connections over {self.args.seconds} s: "
            f"{(full - before) / count / 1000:.1f} kB of server memory each"
        )
        return [row(f"{count:,} idle sessions", "% of a core", share, target=5.0)]

    def until(self, is_true: Callable[[], bool], what: Callable[[], str]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_true():
            if time.monotonic() > deadline:
                raise LoadError(f"gave up: {what()}")
            self.progress.doing(what())
            time.sleep(0.5)


@dataclass(frozen=True, slots=True)
class LoadedServer:
    server: OurServer
    port: int
    engine: Path
    key: str

    @property
    def processes(self) -> Processes:
        return self.server.processes

    def url(self, number: int) -> str:
        """Clients call the server at different loopback addresses: to one address, there are some 28,000 ports."""
        return f"http://127.0.0.{number}:{self.port}"

    def tally(self) -> Tally:
        return Tally.read(self.engine)

    def memory(self) -> int:
        return psutil.Process(self.processes.pid).memory_info().rss

    def connections(self) -> int:
        return psutil.Process(self.processes.pid).num_fds()

    def _metrics(self) -> Metrics:
        with httpx.Client(base_url=self.url(1), headers={"X-API-Key": self.key}, timeout=60) as client:
            return Metrics.parse(client.get("/metrics").raise_for_status().text)

    def refused(self) -> float:
        return sum(n for labels, n in self._metrics().values["palestra_requests_total"].items() if '"429"' in labels)

    def check_waiting(self, count: int) -> None:
        depths = self._metrics().values["palestra_queue_depth"]
        waiting = sum(n for labels, n in depths.items() if 'kind="sample"' in labels)
        if waiting != count:
            raise LoadError(f"{waiting:.0f} samples wait in the server, not {count}")


def check_answers(found: list[dict[str, Any]], count: int) -> None:
    total = {name: sum(one[name] for one in found) for name in ("answered", "distinct", "wrong", "failed")}
    if total != {"answered": count, "distinct": count, "wrong": 0, "failed": 0}:
        errors = [one["first_error"] for one in found if one["first_error"]]
        raise LoadError(f"{count} samples were sent, and came back as {total}; {errors[:1]}")


def row(what: str, unit: str, value: float, *, target: float | None = None, less: bool = True) -> Row:
    return Row(what, unit, Measure((float(value),)), target_value=target, less_is_better=less)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argument_parser(
        "load", "Many samples in flight and many idle sessions, against a server with a fake engine."
    )
    parser.add_argument("--rows", type=some_of("row", ROWS), metavar="NAME,…", help=f"only these ({', '.join(ROWS)})")
    parser.add_argument("--samples", type=positive, help="in flight at once  [131072; 4096 with --quick]")
    parser.add_argument("--clients", type=positive, default=4, help="processes that send them  [4]")
    parser.add_argument("--prompt-tokens", type=positive, default=128, help="of every prompt  [128]")
    parser.add_argument("--group", type=positive, default=16, help="samples with one prompt  [16]")
    parser.add_argument("--sessions", type=positive, help="idle at once  [2000; 250 with --quick]")
    parser.add_argument("--seconds", type=positive, help="for which idle sessions are watched  [60; 20 with --quick]")
    parser.add_argument(
        "--palestra",
        type=Path,
        default=Path(sys.executable).with_name("palestra"),
        metavar="FILE",
        help="the command to start the server with  [the one beside this Python]",
    )
    args = parser.parse_args(argv)
    args.samples = args.samples or (4096 if args.quick else 131_072)
    args.sessions = args.sessions or (250 if args.quick else 2000)
    args.seconds = args.seconds or (20 if args.quick else 60)
    return args


def run(args: argparse.Namespace, progress: Progress) -> Report:
    notes = ["client processes, server and engine share the cores; the engine computes nothing"]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="palestra-bench-") as scratch:
        model = make_model(args.palestra, Path(scratch) / "model", "tiny")
        bench = Bench(args, model, Path(scratch), progress, notes)
        for name in args.rows or ROWS:
            rows += getattr(bench, name)()
    return Report("load", machine(), versions(PACKAGES), rows, notes)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers and clients are stopped too
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    progress = Progress()
    try:
        result = run(args, progress)
    except LoadError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    finally:
        progress.done()
    report(result, json_line=args.json)
    return 0 if all(one.is_met is not False for one in result.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
