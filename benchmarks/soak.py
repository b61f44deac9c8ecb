"""A server at work for minutes or hours: several tenants train, sample, chat and play episodes, and nothing may grow.

    python benchmarks/soak.py --minutes 30
    make soak ARGS="--minutes 480 --json"

In the first third, engine and server are killed (SIGKILL) at random. In the other two thirds they live, so that their
memory can grow: the last third is compared with the middle one. What the server keeps, it keeps for a short time here,
so that purges are part of every third. At the end a tenant trains twice alone, once with its engine killed: both must
have the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import socket
import statistics
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
import tinker
from harness import Measure, Progress, Report, Row, argument_parser, machine, positive, report, versions
from peers.soak_work import KEY, Tenant, Work, all_work
from peers.tinker_server import OurServer, start_server
from safetensors.numpy import load_file

PACKAGES = ("palestra", "tinker", "openai", "torch")
MODEL = "ephebe"
MEASURE_S = 2.0
LINE_S = 60.0
KILL_S = (8.0, 25.0)
"""Pause between two kills."""
CACHE_TOKENS = 4096  # so few that the KV cache is full, and all its memory touched, in the first minutes of an engine
BOUNDS = {
    "server memory": (1.05, 10.0, "MB"),
    "engine memory": (1.05, 20.0, "MB"),
    "state folder": (1.10, 5.0, "MB"),
    "sample p50": (1.25, 50.0, "ms"),
    "sample p99": (1.5, 250.0, "ms"),
    "cheap call p99": (1.5, 50.0, "ms"),
}
"""By how much the last third may be above the middle one: a factor, plus so much."""


class SoakError(Exception):
    """Something was lost, wrong, or has grown."""


@dataclass(frozen=True, slots=True)
class Reading:
    at: float
    server_mb: float
    engine_mb: float
    state_mb: float
    cheap_ms: float


@dataclass(slots=True)
class SoakedServer:
    """A server that is killed and started again at the same address."""

    command: Path
    state: Path
    settings: tuple[str, ...]
    port: int
    server: OurServer
    kills: dict[str, int] = field(default_factory=lambda: {"engine": 0, "server": 0, "both": 0})

    @classmethod
    def start(cls, command: Path, state: Path, settings: tuple[str, ...]) -> SoakedServer:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return cls(command, state, settings, port, start_server(command, MODEL, state, *settings, port=port))

    @property
    def engine_pid(self) -> int:
        (file,) = self.state.glob("worker-*/worker.json")
        return json.loads(file.read_text())["pid"]

    def kill(self, who: str) -> None:
        """Returns when everything is up again."""
        engine = psutil.Process(self.engine_pid)
        if who != "engine":
            self.server.process.kill()
            self.server.process.wait()
        if who != "server":
            engine.kill()
        if who != "engine":
            self.server = start_server(self.command, MODEL, self.state, *self.settings, port=self.port)
        while not self.is_ready():
            time.sleep(0.2)
        self.kills[who] += 1

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.server.url}/readyz", timeout=10).status_code == 200
        return False

    def read(self, client: httpx.Client) -> Reading | None:
        """None while something is down."""
        try:
            started = time.perf_counter()
            client.get("/api/v1/get_server_capabilities").raise_for_status()
            cheap_s = time.perf_counter() - started
            pids = (self.server.process.pid, self.engine_pid)
            server, engine = (psutil.Process(pid).memory_info().rss / 1e6 for pid in pids)
        except (httpx.HTTPError, psutil.Error, ValueError, OSError):
            return None
        return Reading(time.monotonic(), server, engine, folder_mb(self.state), 1000 * cheap_s)


def folder_mb(folder: Path) -> float:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # deleted meanwhile
            total += file.lstat().st_blocks * 512
    return total / 1e6


@dataclass(slots=True)
class Soak:
    server: SoakedServer
    seconds: float
    seed: int
    work: list[Work]
    progress: Progress
    readings: list[Reading] = field(default_factory=list)
    failure: BaseException | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        threads = {one.name: threading.Thread(target=one.run, name=one.name) for one in self.work}
        kills = threading.Thread(target=self._kill_at_random, name="kills")
        for thread in (*threads.values(), kills):
            thread.start()
        try:
            self._measure()
        finally:
            self._ended.set()
            kills.join()
            for one in self.work:  # in this order: what is registered must still be played
                one.is_ending.set()
                threads[one.name].join()
        self._raise_failures()

    def _raise_failures(self) -> None:
        for one in (self, *self.work):
            if one.failure is not None:
                raise SoakError(f"{getattr(one, 'name', 'kills')}: {one.failure}") from one.failure

    def _kill_at_random(self) -> None:
        chance, until = random.Random(self.seed), time.monotonic() + self.seconds / 3
        try:
            while not self._ended.wait(chance.uniform(*KILL_S)) and time.monotonic() < until - KILL_S[0]:
                self.server.kill(chance.choice(list(self.server.kills)))
        except BaseException as e:
            self.failure = e

    def _measure(self) -> None:
        started = next_line = time.monotonic()
        with httpx.Client(base_url=self.server.server.url, headers={"X-API-Key": KEY}, timeout=60) as client:
            while time.monotonic() - started < self.seconds:
                time.sleep(MEASURE_S)
                reading = self.server.read(client)
                if reading is not None:
                    self.readings.append(reading)
                if time.monotonic() - next_line >= LINE_S:
                    self.progress.say(self._line(next_line - started, next_line, time.monotonic()))
                    next_line += LINE_S
                self._raise_failures()

    def _line(self, since_start: float, low: float, high: float) -> str:
        found = self.figures(low, high)
        counts = ", ".join(f"{one.done} {one.name}" for one in self.work)
        kills = ", ".join(f"{who} {count}" for who, count in self.server.kills.items())
        values = ", ".join(f"{name} {value:.0f} {BOUNDS[name][2]}" for name, value in found.items())
        return f"{since_start / 60 + 1:4.0f} min: {values}; {counts}; kills: {kills}"

    def figures(self, low: float, high: float) -> dict[str, float]:
        """Medians and quantiles of what was measured between two moments."""
        readings = [one for one in self.readings if low <= one.at < high]
        samples = [
            1000 * s for one in self.work if one.name == "samples" for at, s in one.latencies if low <= at < high
        ]
        found = {
            "server memory": middle([one.server_mb for one in readings]),
            "engine memory": middle([one.engine_mb for one in readings]),
            "state folder": middle([one.state_mb for one in readings]),
            "sample p50": middle(samples),
            "sample p99": quantile(samples, 0.99),
            "cheap call p99": quantile([one.cheap_ms for one in readings], 0.99),
        }
        return {name: value for name, value in found.items() if value is not None}


def middle(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def quantile(values: list[float], share: float) -> float | None:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def verdict(before: dict[str, float], after: dict[str, float]) -> Iterator[Row]:
    """The last third, and as its target what the middle one allows."""
    for name, (factor, extra, unit) in BOUNDS.items():
        bound = factor * before[name] + extra
        yield Row(
            f"{name}, last third", unit, Measure((after[name],)), target_value=round(bound, 1), less_is_better=True
        )


def same_bits(server: SoakedServer) -> str:
    """A tenant alone, twice; the second time its engine is killed on the way."""
    lives, tensors = [], []
    kills: list[Callable[[int], None] | None] = [None, lambda step: server.kill("engine") if step == 3 else None]
    for on_step in kills:
        tenant = Tenant(server.server.url, MODEL, "the last tenant", number=99)
        with tinker.ServiceClient(base_url=server.server.url, api_key=KEY) as service:
            life = tenant.live(service, on_step)
        lives.append(life)
        model, kind, name = life.path.removeprefix("tinker://").split("/")
        (folder,) = (server.state / "checkpoints" / model.replace(":", "_") / kind).glob(f"{name}@*")
        files = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
        tensors.append([{name: value.tobytes() for name, value in file.items()} for file in files])
    if (lives[0].losses, lives[0].tokens) != (lives[1].losses, lives[1].tokens):
        raise SoakError(f"a tenant alone learns otherwise after a kill of its engine: {lives[0]}, {lives[1]}")
    if tensors[0] != tensors[1] or not tensors[0]:
        raise SoakError("a tenant alone has other weights after a kill of its engine")
    count = sum(len(value) for file in tensors[0] for value in file.values())
    return f"a tenant alone has the same {count:,} bytes of weights and optimizer after a kill of its engine"


def settings_for(seconds: float) -> tuple[str, ...]:
    """Whatever is kept is deleted several times in every third."""
    keep = max(5, round(seconds / 12))
    kept = ("keep_results_s", "keep_runs_s", "keep_traces_s", "keep_conversations_s", "episodes.keep_ended_s")
    return (
        *(f"{name}={keep}" for name in kept),
        "keep_deleted_s=5",
        "models.0.snapshot_every_s=2",
        "models.0.threads=1",
        f"models.0.cache_tokens={CACHE_TOKENS}",
    )


def run(args: argparse.Namespace, progress: Progress) -> Report:
    seconds, started = 60.0 * args.minutes, time.monotonic()
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="palestra-soak-") as scratch:
        server = SoakedServer.start(args.palestra, Path(scratch), settings_for(seconds))
        try:
            work = all_work(server.server.url, MODEL, args.tenants)
            soak = Soak(server, seconds, args.seed, work, progress)
            soak.run()
            thirds = [soak.figures(started + i * seconds / 3, started + (i + 1) * seconds / 3) for i in range(3)]
            notes.append(same_bits(server))
        finally:
            server.server.stop()
    counts = ", ".join(f"{one.done:,} {'steps of ' if isinstance(one, Tenant) else ''}{one.name}" for one in work)
    kills = ", ".join(f"{who} {count}" for who, count in server.kills.items())
    notes.append(f"{args.minutes} minutes: {counts}; all answers were right; kills: {kills}")
    notes.append("target: the middle third, with some room: " + ", ".join(f"{k} {v:.0f}" for k, v in thirds[1].items()))
    return Report("soak", machine(), versions(PACKAGES), list(verdict(thirds[1], thirds[2])), notes)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argument_parser("soak", "A server at work for minutes or hours, with kills; nothing may be lost or grow.")
    parser.add_argument("--minutes", type=positive, help="how long  [30; 3 with --quick]")
    parser.add_argument("--tenants", type=positive, default=3, help="that train at once  [3]")
    parser.add_argument("--seed", type=int, default=0, help="of the kills  [0]")
    parser.add_argument(
        "--palestra",
        type=Path,
        default=Path(sys.executable).with_name("palestra"),
        metavar="FILE",
        help="the command to start the server with  [the one beside this Python]",
    )
    args: Any = parser.parse_args(argv)
    args.minutes = args.minutes or (3 if args.quick else 30)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped too
    progress = Progress()
    try:
        result = run(args, progress)
    except SoakError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    finally:
        progress.done()
    report(result, json_line=args.json)
    return 0 if all(one.is_met for one in result.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
