"""How fast the dashboard lists and opens runs: a thousand of them, ten million rollouts, ten thousand steps in one; and
how fast a server with the bundled model shows the same, and itself.

    python benchmarks/view.py --quick
    python benchmarks/view.py --runs 1000 --rollouts 10000000

The runs are made, not played: one step's rollouts are written once and linked into every step of every run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import httpx
import psutil
from harness import Measure, Progress, Report, Row, argument_parser, machine, report, versions

from palestra.runs.record_files import write_records
from palestra.view.runs.panels import ROWS

GROUP, GROUPS = 8, 16
LONG_STEPS = 10_000
LINKS = 40_000  # to one file; ext4 allows 65,000
METRICS = 100
ROUNDS = 5
READY = "Palestra is ready at "
FIRST_PAINT_MS, RUN_PAGE_MS, MEMORY_MB = 300.0, 1000.0, 300.0  # what the page people have open all day may cost
PAGES = {
    "list of runs": "/",
    "filtered list": "/?filter=run-00",
    "config of a run, beside another": "/runs/run-0001/config?against=long",
    "events of a run": "/runs/run-0001/events",
    "checkpoints of a run": "/runs/run-0001/checkpoints",
    "groups of a step": "/runs/run-0001/rollouts",
    "groups of a step of the long run": "/runs/long/rollouts?step=5000",
    "a rollout": "/runs/run-0001/rollout?step=1&id=g1-1",
    "four runs compared": "/compare?run=run-0001&run=run-0002&run=run-0003&run=run-0004",
    "their charts": "/api/v1/compare/charts?run=run-0001&run=run-0002&run=run-0003&run=run-0004",
    "page of the long run, again": "/runs/long",
    "charts of the long run, again": "/api/v1/runs/long/charts",
}


SERVER_PAGES = {
    "list of runs, by a server": "/",
    "groups of a step, by a server": "/runs/run-0001/rollouts",
    "a rollout, by a server": "/runs/run-0001/rollout?step=1&id=g1-1",
    "playing its task again": "/again?run=run-0001&step=1&id=g1-1",
    "the server live": "/server",
    "its charts": "/api/v1/server/charts",
    "episodes": "/episodes",
    "playground": "/playground",
    "traces": "/traces",
    "keys": "/keys",
    "platform, by a server": "/platform",
}


def main() -> None:
    parser = argument_parser("view", __doc__ or "")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rollouts", type=int, default=10_000_000, help="in all runs together")
    args = parser.parse_args()
    if args.quick:
        args.runs, args.rollouts = 50, 100_000
    with tempfile.TemporaryDirectory(dir=".") as folder:
        root = Path(folder)
        steps = max(1, args.rollouts // (args.runs * GROUP * GROUPS))
        Progress().say(f"making {args.runs} runs of {steps} steps")
        make_runs(root, args.runs, steps)
        rows = measure(root, args, steps)
    report(Report("view", machine(), versions(["palestra", "fastapi", "jinja2"]), rows), json_line=args.json)


def make_runs(root: Path, count: int, steps: int) -> None:
    shared = root / "shared.jsonl.zst"
    for number in range(count):
        if number * steps // LINKS != (number - 1) * steps // LINKS:
            shared.unlink(missing_ok=True)
            write_records(shared, (rollout(index) for index in range(GROUP * GROUPS)))
        make_run(root / f"run-{number:04d}", steps, shared)
    make_run(root / "long", LONG_STEPS, shared)
    shared.unlink()


def make_run(path: Path, steps: int, shared: Path) -> None:
    (path / "rollouts").mkdir(parents=True)
    config = {"kind": "grpo", "model": {"name": "made"}, "environments": [{"name": "made"}], "steps": steps}
    about = {"format": 1, "name": path.name, "kind": "grpo", "created": time.time(), "config": config, "facts": {}}
    (path / "config.json").write_text(json.dumps(about))
    (path / "summary.json").write_text('{"status": "done"}')
    (path / "metrics.jsonl").write_text("".join(json.dumps(figures(step)) + "\n" for step in range(1, steps + 1)))
    for step in range(1, steps + 1):
        os.link(shared, path / "rollouts" / f"step_{step:06d}.jsonl.zst")


def metric_names() -> list[str]:
    """All that a run's page draws, and others."""
    drawn = [name for row in ROWS for panel in row.panels for name in (*panel.lines, *(panel.band or ()))]
    names = dict.fromkeys(name.replace("*", part) for name in drawn for part in ("easy", "hard"))
    return [*names, *(f"env/made/metric_{number}" for number in range(METRICS))][:METRICS]


NAMES = metric_names()


def figures(step: int) -> dict[str, float]:
    row = {"step": step, "time": 1.8e9 + step, "attempt": 1}
    return row | {name: 0.5 + 0.4 * math.sin((step + 1) * (at + 1) / 300) for at, name in enumerate(NAMES)}


def rollout(index: int) -> dict[str, object]:
    messages = [
        {"role": "user", "content": "How many are there? " * 10},
        {"role": "assistant", "content": "Forty-two. " * 40},
    ]
    numbers = {"index": index % GROUP, "tokens": 100 + index, "turns": 2, "prompt_tokens": 40, "version": 1}
    names = {
        "id": f"g{index // GROUP}-{index % GROUP}",
        "group": f"g{index // GROUP}",
        "task": "made",
        "environment": "made",
    }
    outcome = {"reward": float(index % 3 == 0), "stop": "done", "error": None, "used": True, "metrics": {}}
    return {**names, **numbers, **outcome, "temperature": 1.0, "seconds": 1.0, "step": 1, "messages": messages}


def measure(root: Path, args: argparse.Namespace, steps: int) -> list[Row]:
    size = f"{args.runs} runs, {args.rollouts:,} rollouts"
    long_run = f"page and charts of a run of {LONG_STEPS} steps, {METRICS} metrics"
    with served(root) as (client, _):
        alone = opened(client, "long")
    with served(root) as (client, process):
        cold = timed(client, "/", 1)
        at_first = opened(client, "long")
        pages = {name: timed(client, path) for name, path in PAGES.items()}
        search = timed(client, "/runs/run-0001/rollouts?every=1&where=reward=1", 1)
        memory = Measure((most_memory_mb(process),))
    with served(root) as (client, _):
        warm = timed(client, "/", 1)
        restarted = opened(client, "long")
    with server_of(root) as (client, process):
        before = most_memory_mb(process)
        client.get("/login")  # the pages are made at the first request
        of_server = {name: timed(client, path) for name, path in SERVER_PAGES.items()}
        more_memory = Measure((most_memory_mb(process) - before,))
    return [
        Row(f"list of runs at first, without an index: {size}", "ms", cold, less_is_better=True),
        page_row("list of runs after a start, with the index", warm),
        *(page_row(name, one) for name, one in pages.items()),
        Row(f"condition over {steps} steps of a run, at first", "ms", search, less_is_better=True),
        page_row(f"{long_run}, without an index", alone, RUN_PAGE_MS),
        page_row(f"{long_run}, at first", at_first, RUN_PAGE_MS),
        page_row(f"{long_run}, after a start", restarted, RUN_PAGE_MS),
        *(page_row(name, one) for name, one in of_server.items()),
        Row("most memory of the dashboard", "MB", memory, target_value=MEMORY_MB, less_is_better=True),
        Row("memory that pages add to a server", "MB", more_memory, target_value=MEMORY_MB, less_is_better=True),
    ]


def page_row(name: str, found: Measure, target_ms: float = FIRST_PAINT_MS) -> Row:
    return Row(name, "ms", found, target_value=target_ms, less_is_better=True)


def opened(client: httpx.Client, run: str) -> Measure:
    """Milliseconds until a run's page and the numbers of its charts are there."""
    return Measure((sum(timed(client, path, 1).median for path in (f"/runs/{run}", f"/api/v1/runs/{run}/charts")),))


def most_memory_mb(process: psutil.Process) -> float:
    """The most that it has held at any time, where the system says it."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return process.memory_info().rss / 1e6
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


@contextlib.contextmanager
def served(root: Path) -> Iterator[tuple[httpx.Client, psutil.Process]]:
    command = [sys.executable, "-m", "palestra", "view", str(root), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().rpartition(": ")[2].strip().rstrip("/")
        try:
            with httpx.Client(base_url=address, timeout=600) as client:
                client.get("/login")
                yield client, psutil.Process(process.pid)
        finally:
            process.terminate()


@contextlib.contextmanager
def server_of(root: Path) -> Iterator[tuple[httpx.Client, psutil.Process]]:
    """`palestra serve` with the bundled model; its engine is a process of its own."""
    with tempfile.TemporaryDirectory() as state:
        command = [
            sys.executable,
            "-m",
            "palestra",
            "serve",
            "--port",
            "0",
            "--state",
            state,
            f"runs={root.absolute()}",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            line = next(line for line in process.stdout if READY in line)
            address = line.partition(READY)[2].split()[0].rstrip(".,")
            Thread(target=process.stdout.read, daemon=True).start()  # it goes on only while its output is read
            try:
                with httpx.Client(base_url=f"{address}/ui", timeout=600) as client:
                    yield client, psutil.Process(process.pid)
            finally:
                process.terminate()


def timed(client: httpx.Client, path: str, rounds: int = ROUNDS) -> Measure:
    """Milliseconds until the whole page is there."""
    values = []
    for _ in range(rounds):
        begin = time.perf_counter()
        client.get(path).raise_for_status()
        values.append(1000 * (time.perf_counter() - begin))
    return Measure(tuple(values))


if __name__ == "__main__":
    main()
