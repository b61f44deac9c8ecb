"""Our own server as a child process, and what can be seen of a server from outside: memory, CPU, metrics."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

START_S = 180.0
STOP_S = 45.0
READY = re.compile(r"Palestra is ready at (\S+)")
SAMPLE = re.compile(r"^(\w+)\{(.*)\} (\S+)$", re.MULTILINE)


class ServerError(Exception):
    """It did not start, or did not stop."""


@dataclass(frozen=True, slots=True)
class Processes:
    """A server and all it has started."""

    pid: int

    def all(self) -> list[psutil.Process]:
        top = psutil.Process(self.pid)
        return [top, *top.children(recursive=True)]

    def memory_gb(self) -> float:
        """Proportional set size: shared pages count once."""
        return sum(process.memory_full_info().pss for process in self.all()) / 1e9

    def cpu_percent(self, seconds: float) -> float:
        """Share of one core, over this time."""
        before = self._cpu_s()
        time.sleep(seconds)
        return 100 * (self._cpu_s() - before) / seconds

    def own_cpu_s(self) -> float:
        """CPU time of the first process alone, which serves HTTP."""
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system

    def _cpu_s(self) -> float:
        times = [process.cpu_times() for process in self.all()]
        return sum(t.user + t.system for t in times)


@dataclass(slots=True)
class OurServer:
    url: str
    process: subprocess.Popen[str]
    started: float
    """`time.perf_counter` when the process was started."""
    ready_s: float = 0.0
    """From there until it said that it was ready."""

    @property
    def processes(self) -> Processes:
        return Processes(self.process.pid)

    def metrics(self) -> Metrics:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            return Metrics.parse(answer.read().decode())

    def stop(self) -> None:
        children = self.processes.all() if self.process.poll() is None else []
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise ServerError(f"still there {STOP_S:g} s after SIGTERM") from None
        finally:
            _, left = psutil.wait_procs(children, timeout=5)
            for child in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        if left:
            raise ServerError(f"left {len(left)} processes behind")


@contextlib.contextmanager
def our_server(
    command: Path, model: Path | str, state: Path, *settings: str, environment: Mapping[str, str] | None = None
) -> Iterator[OurServer]:
    """With the defaults but for `settings` and variables of the environment; ready when this yields."""
    server = start_server(command, model, state, *settings, environment=environment)
    try:
        yield server
    finally:
        server.stop()


def start_server(
    command: Path,
    model: Path | str,
    state: Path,
    *settings: str,
    port: int = 0,
    environment: Mapping[str, str] | None = None,
) -> OurServer:
    """Returns when it is ready."""
    state.mkdir(parents=True, exist_ok=True)
    log = state / "server.log"
    arguments = [str(command), "serve", "--model", str(model), "--state", str(state), "--port", str(port), *settings]
    started = time.perf_counter()
    with log.open("a") as err:
        process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=err, text=True, env=os.environ | (environment or {})
        )
    url = _ready_url(process, log)
    return OurServer(url, process, started, time.perf_counter() - started)


def _ready_url(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    alarm = threading.Timer(START_S, process.kill)
    alarm.start()
    try:
        for line in process.stdout:
            if found := READY.search(line):
                return found[1]
    finally:
        alarm.cancel()
    process.wait()
    last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
    raise ServerError(f"palestra serve ended with {process.returncode} before it was ready: {last[0]}")


def make_model(command: Path, folder: Path, shape: str) -> Path:
    """By our command line: this process has no torch."""
    subprocess.run([str(command), "model", "random", str(folder), "--shape", shape], check=True, capture_output=True)
    return folder


@dataclass(frozen=True, slots=True)
class Histogram:
    """What happened between two readings."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    """Up to each bound, as Prometheus counts."""
    total_s: float

    @property
    def mean(self) -> float:
        return self.total_s / self.counts[-1]

    def quantile(self, q: float) -> float:
        """Linear inside a bucket."""
        wanted, low, below = q * self.counts[-1], 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count >= wanted:
                return low if bound == float("inf") else low + (bound - low) * (wanted - below) / (count - below)
            low, below = bound, count
        return low


@dataclass(frozen=True, slots=True)
class Metrics:
    values: dict[str, dict[str, float]]
    """By name, then by labels as they are written."""

    @classmethod
    def parse(cls, text: str) -> Metrics:
        values: dict[str, dict[str, float]] = defaultdict(dict)
        for name, labels, value in SAMPLE.findall(text):
            values[name][labels] = float(value)
        return cls(values)

    def histogram_since(self, earlier: Metrics, name: str, kind: str) -> Histogram:
        """Histogram of one `type` of calls, over all base models."""
        counts: dict[float, float] = defaultdict(float)
        total = 0.0
        for metrics, sign in ((self, 1), (earlier, -1)):
            for labels, value in metrics.values.get(f"{name}_bucket", {}).items():
                bound = re.search(r'le="([^"]+)"', labels)
                if bound and f'type="{kind}"' in labels:
                    counts[float(bound[1])] += sign * value
            sums = metrics.values.get(f"{name}_sum", {})
            total += sign * sum(value for labels, value in sums.items() if f'type="{kind}"' in labels)
        if not counts or not max(counts.values()):
            raise ServerError(f"/metrics has counted no {kind} in {name}")
        bounds = sorted(counts)
        return Histogram(tuple(bounds), tuple(counts[bound] for bound in bounds), total)
