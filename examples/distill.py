"""On-policy distillation beside GRPO and SFT, on the bundled model, with the demo's own trained adapter as the teacher.

`python examples/distill.py` runs the demo (GRPO, on rewards alone) unless it is there, takes its best adapter as the
teacher, and lets two fresh students learn from it: one plays and gets the teacher's log-probability of each of its
tokens (`kind: distill`), one imitates conversations of the teacher that were rewarded (`kind: sft`). Prints the share
of 256 held-out tasks that each solves, step by step. About half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from palestra.runs.reader import RunReader

BATCH = 96
"""Rollouts, or conversations, of a step: the same for all."""
EVAL = {"every": 2, "tasks": 256}
DISTILL = {
    "kind": "distill",
    "environments": [{"name": "stockroom"}],
    "teachers": [{"model": "demo@best"}],
    "rollout": {"group_size": 4, "groups_per_step": BATCH // 4, "max_tokens": 48, "max_context": 640},
    "data": {"max_sequence_length": 640},
    "optimizer": {"lr": 2e-3},
    "eval": EVAL,
}
SFT = {
    "kind": "sft",
    "batch_size": BATCH,
    "max_sequence_length": 640,
    "optimizer": {"lr": 2e-3},
    "checkpoint": {"every": EVAL["every"], "keep": 100},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the runs' folders go")
    parser.add_argument("--steps", type=int, default=10, help="steps of the two students")
    options = parser.parse_args()
    runs, steps = options.runs, options.steps
    ensure(runs, "demo", "train", "demo", "eval.every=2")
    ensure(runs, "distill", "train", written(runs / "distill.json", {**DISTILL, "steps": steps}))
    write_conversations(RunReader(runs / "demo"), runs / "teacher.jsonl")
    sft = {**SFT, "data": str(runs / "teacher.jsonl"), "steps": steps}
    ensure(runs, "sft", "train", written(runs / "sft.json", sft))
    evaluated = range(2, steps + 1, 2)
    for step in evaluated:
        settings = ("tasks=256", "max_tokens=48", "max_context=640")
        ensure(runs, f"sft-eval-{step}", "eval", "stockroom", f"model=sft@{step}", *settings)
    show({name: curve(RunReader(runs / name)) for name in ("demo", "distill")}, sft_curve(runs, evaluated))


def written(file: Path, config: Mapping[str, object]) -> str:
    file.write_text(json.dumps(config))
    return str(file)


def ensure(runs: Path, name: str, *arguments: str) -> None:
    """Runs a command of Palestra, unless its run is there."""
    if (runs / name / "summary.json").exists():
        return
    print(f"palestra {' '.join(arguments)} --name {name}", flush=True)
    command = [sys.executable, "-m", "palestra.cli", *arguments, "--name", name, f"runs={runs}"]
    subprocess.run(command, check=True)


def write_conversations(demo: RunReader, file: Path) -> None:
    """Writes what the teacher said where it was rewarded: the rollouts of the demo's last two steps."""
    last = demo.read_metrics()[-1]["step"]
    rows = [row for step in (last - 1, last) for row in demo.read_rollouts(step) if row["reward"] == 1]
    file.write_text("".join(json.dumps({"messages": row["messages"]}) + "\n" for row in rows))


def curve(run: RunReader) -> dict[int, float]:
    return {row["step"]: row["eval/success"] for row in run.read_metrics() if "eval/success" in row}


def sft_curve(runs: Path, steps: range) -> dict[int, float]:
    return {step: curve(RunReader(runs / f"sft-eval-{step}"))[0] for step in steps}


def show(curves: dict[str, dict[int, float]], sft: dict[int, float]) -> None:
    columns = {"GRPO": curves["demo"], "distill": curves["distill"], "SFT": sft | {0: curves["distill"][0]}}
    print("step  " + "  ".join(f"{name:>8}" for name in columns))
    for step in sorted({step for one in columns.values() for step in one}):
        print(f"{step:4}  " + "  ".join(f"{one[step]:8.1%}" if step in one else " " * 8 for one in columns.values()))


if __name__ == "__main__":
    main()
