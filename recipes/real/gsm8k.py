"""Trains Qwen3-0.6B, or another model, on GSM8K with one card, and reports what came of it.

    palestra model pull Qwen/Qwen3-0.6B
    hf download --repo-type dataset openai/gsm8k
    python recipes/real/gsm8k.py                       # --model Qwen/Qwen3-1.7B, --steps 20 optimizer.lr=1e-5 …

Evaluates held-out questions, trains by GRPO, evaluates again, and writes a report with a line to share into the run's
folder. Killed at any time, it goes on when the same command is given again. It was run with random models only: whoever
has a card is the first to see it learn.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import yaml

import palestra.runs
from palestra.environments import spec
from palestra.runs import Run, RunNotFound, RunStatus
from palestra.util.hugging_face import find_in_cache

GIB = 2**30
BARS = " ▁▂▃▄▅▆▇█"
PEAK_FILE = "peak_memory.json"


def main() -> int:
    args = parse_args()
    try:
        model = args.model if Path(args.model).is_dir() else str(find_in_cache(args.model))
        count = {split: len(spec("gsm8k").load().tasks(split, data_config(args))) for split in ("train", "eval")}
    except ValueError as error:  # says how to get what is missing
        print(f"error: {error}\n  to this recipe they are given as --model DIR and --data DIR", file=sys.stderr)
        return 2
    print(f"{args.model}, {count['train']} questions to train on, {count['eval']} held out; {machine()}", flush=True)
    status = run_status(args)
    if status is not RunStatus.DONE:
        with peak_memory(args.runs / args.name):
            code = subprocess.call([sys.executable, "-m", "palestra", "train", *train_arguments(args, model, status)])
        if code:
            print("not done; the same command goes on with it", file=sys.stderr)
            return code
    report = report_of(palestra.runs.open(args.name, args.runs), shared_name(args.model))
    (args.runs / args.name / "report.md").write_text(report, encoding="utf-8")
    print(f"\n{report}")
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", metavar="ID_OR_DIR")
    parser.add_argument("--data", metavar="DIR", help="folder with train.jsonl and test.jsonl [the hub's cache]")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--name", default="gsm8k", help="of the run")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="as for palestra train")
    return parser.parse_args()


def data_config(args: argparse.Namespace) -> dict[str, Any]:
    return {"system": "/no_think"} | ({"data": args.data} if args.data else {})


def config_of(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Sized for a card with 24 GB."""
    return {
        "kind": "grpo",
        "model": {"name": model, "rank": 32},
        "environments": [{"name": "gsm8k", "config": data_config(args)}],
        "rollout": {"group_size": 8, "groups_per_step": 32, "max_tokens": 768, "max_context": 1280},
        "data": {"max_sequence_length": 1280, "refill_ahead": True},
        "steps": args.steps,
        "eval": {"every": 20, "tasks": 400},
        "checkpoint": {"every": 10},
        "runs": str(args.runs),
    }


def train_arguments(args: argparse.Namespace, model: str, status: RunStatus | None) -> list[str]:
    if status is not None:
        return ["--resume", str(args.runs / args.name)]
    args.runs.mkdir(parents=True, exist_ok=True)
    config = args.runs / f"{args.name}.yaml"
    config.write_text(yaml.safe_dump(config_of(args, model), sort_keys=False))
    return [str(config), "--name", args.name, *args.settings]


def run_status(args: argparse.Namespace) -> RunStatus | None:
    """None: there is no such run yet."""
    try:
        return palestra.runs.open(args.name, args.runs).status()
    except RunNotFound:
        return None


def shared_name(model: str) -> str:
    """Without the path on this machine."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def machine() -> str:
    if cards := nvidia("name", "driver_version"):
        name, driver = cards[0]
        return f"{len(cards)} x {name}, driver {driver}"
    return f"{psutil.cpu_count()} cores ({platform.machine()}), no NVIDIA card"


def nvidia(*fields: str) -> list[list[str]]:
    """These fields of each card; empty where there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [[part.strip() for part in line.split(",")] for line in output.splitlines()]


@contextmanager
def peak_memory(run: Path) -> Iterator[None]:
    """Keeps the most memory that was seen in use, on the card or else by our processes, in the run's folder."""
    over, seen = threading.Event(), [0.0]

    def watch() -> None:
        while not over.wait(1.0):
            seen[0] = max(seen[0], used_gib())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        if run.is_dir():
            (run / PEAK_FILE).write_text(json.dumps(max(seen[0], read_peak(run))))


def used_gib() -> float:
    if (cards := nvidia("memory.used")) and cards[0][0].isdigit():
        return float(cards[0][0]) / 1024
    sizes = []
    for process in psutil.Process().children(recursive=True):
        try:
            sizes.append(process.memory_info().rss)
        except psutil.NoSuchProcess:
            continue
    return sum(sizes) / GIB


def read_peak(run: Path) -> float:
    file = run / PEAK_FILE
    return float(json.loads(file.read_text())) if file.is_file() else 0.0


def report_of(run: Run, model: str) -> str:
    rows = run.read_metrics()
    evals = [(row["step"], row["eval/success"]) for row in rows if "eval/success" in row]
    steps = [row for row in rows if "reward/mean" in row]
    rewards = values(steps, "reward/mean")
    sampled, trained, total = (
        median(values(steps, f"throughput/{kind}_tokens_per_s") or [0.0]) for kind in ("collect", "update", "total")
    )
    mismatch = max(values(steps, "mismatch/logprob_abs_max"), default=0.0)
    minutes, peak = run.read_summary()["seconds"] / 60, read_peak(run.path)
    (_, before), (last, after) = evals[0], evals[-1]
    line = (
        f"Palestra {version('palestra')}, GSM8K: {model} on {machine()}: {before:.1%} → {after:.1%} in {last} steps, "
        f"{minutes:.0f} min; {total:,.0f} tokens/s, mismatch {mismatch:.1e}, peak {peak:.1f} GiB"
    )
    facts = {
        "machine": f"{machine()}; torch {version('torch')}",
        "held-out questions solved": ", ".join(f"{value:.1%} (step {step})" for step, value in evals),
        "reward": f"{rewards[0]:.2f} {curve(rewards)} {rewards[-1]:.2f}",
        "tokens a second, median": f"{sampled:,.0f} sampled, {trained:,.0f} trained, {total:,.0f} over all",
        "sampler and trainer": f"log-probabilities differ by {mismatch:.1e} at most",
        "peak memory": f"{peak:.1f} GiB",
        "time": f"{minutes:.1f} minutes",
    }
    return f"# GSM8K\n\n{line}\n\n" + "".join(f"- {name}: {value}\n" for name, value in facts.items())


def values(rows: list[dict[str, Any]], metric: str) -> list[float]:
    """Of the steps that have it: one without informative groups trains nothing."""
    return [row[metric] for row in rows if metric in row]


def curve(rewards: list[float], width: int = 40) -> str:
    """A bar for each reward from 0 to 1, or for the mean of several."""
    size = max(1, -(-len(rewards) // width))
    means = [sum(part) / len(part) for part in (rewards[i : i + size] for i in range(0, len(rewards), size))]
    return "".join(BARS[round(min(max(mean, 0.0), 1.0) * (len(BARS) - 1))] for mean in means)


if __name__ == "__main__":
    sys.exit(main())
