"""How fast the dashboard lists and opens runs: a thousand of them, ten million rollouts, ten thousand steps in one.

    python benchmarks/view.py --quick
    python benchmarks/view.py --runs 1000 --rollouts 10000000

The runs are made, not played: one step's rollouts are written once and linked into every step of every run.

Owns: the folder, the rows and their targets. Never touches: how pages are made.
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

import httpx
import psutil
from harness import Measure, Progress, Report, Row, argument_parser, machine, report, versions

from palestra.runs.record_files import write_records

GROUP, GROUPS = 8, 16
LONG_STEPS = 10_000
METRICS = 100
ROUNDS = 5
FIRST_PAINT_MS, RUN_PAGE_MS, MEMORY_MB = 300.0, 1000.0, 300.0  # what the page people have open all day may cost


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
    write_records(shared, (rollout(index) for index in range(GROUP * GROUPS)))
    for number in range(count):
        make_run(root / f"run-{number:04d}", steps, shared)
    make_run(root / "long", LONG_STEPS, shared, with_rollouts=min(steps, 100))
    shared.unlink()


def make_run(path: Path, steps: int, shared: Path, with_rollouts: int | None = None) -> None:
    (path / "rollouts").mkdir(parents=True)
    config = {"kind": "grpo", "model": {"name": "made"}, "environments": [{"name": "made"}], "steps": steps}
    about = {"format": 1, "name": path.name, "kind": "grpo", "created": time.time(), "config": config, "facts": {}}
    (path / "config.json").write_text(json.dumps(about))
    (path / "summary.json").write_text('{"status": "done"}')
    (path / "metrics.jsonl").write_text("".join(json.dumps(figures(step)) + "\n" for step in range(1, steps + 1)))
    for step in range(1, (with_rollouts or steps) + 1):
        os.link(shared, path / "rollouts" / f"step_{step:06d}.jsonl.zst")


def figures(step: int) -> dict[str, float]:
    row = {"step": step, "time": 1.8e9 + step, "attempt": 1, "reward/mean": 0.5 + 0.4 * math.sin(step / 300)}
    return row | {f"env/made/metric_{number}": math.sin(step * number) for number in range(METRICS)}


def rollout(index: int) -> dict[str, object]:
    said = [
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
    return {**names, **numbers, **outcome, "temperature": 1.0, "seconds": 1.0, "step": 1, "messages": said}


def measure(root: Path, args: argparse.Namespace, steps: int) -> list[Row]:
    with served(root) as (client, process):
        cold = timed(client, "/", 1)
        pages = {
            "list of runs": timed(client, "/"),
            "filtered list": timed(client, "/?filter=run-00"),
            "groups of a step": timed(client, "/runs/run-0001/rollouts"),
            "a rollout": timed(client, f"/runs/run-0001/rollout?step={min(steps, 1)}&id=g1-1"),
        }
        search = timed(client, "/runs/run-0001/rollouts?every=1&where=reward=1", 1)
        charts = Measure((timed(client, "/runs/long", 1).median + timed(client, "/api/v1/runs/long/charts", 1).median,))
        again = timed(client, "/api/v1/runs/long/charts")
        memory = Measure((process.memory_info().rss / 1e6,))
    with served(root) as (client, _):
        warm = timed(client, "/", 1)
    size = f"{args.runs} runs, {args.rollouts:,} rollouts"
    rows = [
        Row(f"first list without an index: {size}", "ms", cold, less_is_better=True),
        Row("first list with the index", "ms", warm, target_value=FIRST_PAINT_MS, less_is_better=True),
    ]
    rows += [Row(name, "ms", one, target_value=FIRST_PAINT_MS, less_is_better=True) for name, one in pages.items()]
    rows += [Row(f"condition over {steps} steps of a run, at first", "ms", search, less_is_better=True)]
    rows += [
        Row(
            f"a run of {LONG_STEPS} steps, page and charts, at first",
            "ms",
            charts,
            target_value=RUN_PAGE_MS,
            less_is_better=True,
        ),
        Row("its charts again", "ms", again, less_is_better=True),
        Row("memory of the server", "MB", memory, target_value=MEMORY_MB, less_is_better=True),
    ]
    return rows


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
