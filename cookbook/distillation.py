"""`make cookbook-distillation`: the cookbook's on-policy distillation beside ours, at one server, on the same prompts.

Makes a small random model, teaches it something by the cookbook's `sl_loop`, and lets two students without that lesson
learn from it: one by the cookbook's recipe, one by `palestra train` with `kind: distill`. Two things are compared. What
the cookbook's code says about the rows that our student sampled: its advantages and its `teacher_kl` must be ours. And
the curves of the two students, which sample for themselves: they must fall alike.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from run import (
    CookbookError,
    first_checkpoint,
    folder_of,
    interrupted,
    prepare,
    read_metrics,
    run_quietly,
    run_recipe,
    serving,
)

from palestra.runs.reader import RunReader
from recipes import MODEL, recipe

HERE = Path(__file__).resolve().parent
STEPS, GROUPS, GROUP_SIZE, MAX_TOKENS, RANK, RATE = 12, 8, 4, 24, 8, 2e-3
SAME = 1e-4
"""Largest difference of an advantage: both ask the same server about the same tokens, in other batches."""
ALIKE = 0.15
"""Largest difference of two students' mean KL, as a share of what it was at first. Each step has other samples."""


def main() -> int:
    options = parse_options()
    work = Path(options.work or tempfile.mkdtemp(prefix="palestra-distillation-")).resolve()
    try:
        prepare(work, options.python, "micro", [MODEL])
        with serving(work, [MODEL]) as url:
            teacher = teach(work, url, options.python)
            theirs = cookbook_curve(work, url, options.python, teacher)
            run = our_run(work, url, teacher)
            ours = [row["kl/teacher"] for row in run.read_metrics()]
            gap = largest_gap(work, url, options.python, teacher, run)
    except CookbookError as error:
        print(f"\n{error}\n\nleft for you to look at: {work}", file=sys.stderr)
        return 1
    return verdict(theirs, ours, gap)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has tinker-cookbook")
    parser.add_argument("--work", metavar="DIR", help="work here; else in a temporary folder")
    options = parser.parse_args()
    options.python = str(Path(options.python).absolute())
    return options


def teach(work: Path, url: str, python: str) -> str:
    """Returns the address of a teacher: weights for sampling that differ from the model's."""
    print("a teacher, by sl_loop", flush=True)
    run_recipe(
        recipe("sl_loop", "sl_loop", "batch_size=16 learning_rate=0.003", steps=12, shows="train_mean_nll"),
        *(work, url, python),
    )
    return first_checkpoint(work, "sampler_path")


def cookbook_curve(work: Path, url: str, python: str, teacher: str) -> list[float]:
    print("a student, by the cookbook", flush=True)
    args = f"teacher_model={MODEL} teacher_checkpoint={teacher} groups_per_batch={GROUPS} group_size={GROUP_SIZE}"
    args += f" max_tokens={MAX_TOKENS} lora_rank={RANK} learning_rate={RATE} eval_every=0 save_every=0"
    name = "on_policy_distillation"
    one = recipe(name, f"distillation.{name}", args, steps=STEPS, shows="teacher_kl")
    run_recipe(one, work, url, python)
    return [step["teacher_kl"] for step in read_metrics(work / "runs" / name)]


def our_run(work: Path, url: str, teacher: str) -> RunReader:
    """The same settings: losses are sums, as the cookbook has them, and no gradient is clipped."""
    print("a student, by palestra train", flush=True)
    config: dict[str, Any] = {
        "kind": "distill",
        "server": url,
        "runs": str(work / "ours"),
        "model": {"name": MODEL, "rank": RANK, "tokenizer": str(folder_of(work, MODEL))},
        "environments": [{"name": "prompts", "tasks": str(work / "prompts.jsonl")}],
        "teachers": [{"model": teacher}],
        "rollout": {"groups_per_step": GROUPS, "group_size": GROUP_SIZE, "max_tokens": MAX_TOKENS},
        "algorithm": {"normalize": "none"},
        "optimizer": {"lr": RATE, "grad_clip": 0},
        "eval": {"every": 0},
        "steps": STEPS,
    }
    (work / "distill.json").write_text(json.dumps(config))
    command = ["train", str(work / "distill.json"), "--name", "student", "--display", "lines"]
    run_quietly("our distillation", [sys.executable, "-m", "palestra.cli", *command])
    return RunReader(work / "ours" / "student")


def largest_gap(work: Path, url: str, python: str, teacher: str, run: RunReader) -> float:
    """Lets the cookbook compute the advantages of the rows of our last step. Returns the largest difference."""
    print("the cookbook's advantages of our student's rows", flush=True)
    rows = work / "rows.json"
    rows.write_text(json.dumps(run.read_tokens(STEPS)))
    command = [python, str(HERE / "advantages_of_rows.py"), str(rows), url, teacher]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CookbookError(f"the cookbook's advantages could not be computed:\n{done.stderr[-2000:]}")
    theirs = json.loads(done.stdout.splitlines()[-1])
    ours = [row["advantages"][1:] for row in run.read_tokens(STEPS)]
    return max(abs(a - b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True))


def verdict(theirs: list[float], ours: list[float], gap: float) -> int:
    print("\nKL to the teacher, step by step\n  cookbook  palestra")
    for one, other in zip(theirs, ours, strict=True):
        print(f"  {one:8.4f}  {other:8.4f}")
    first = (theirs[0] + ours[0]) / 2
    apart = abs(sum(theirs) - sum(ours)) / len(ours) / first
    print(f"\nlargest difference of an advantage on the same rows: {gap:.1e} (at most {SAME:g})")
    print(f"difference of the curves' means: {apart:.0%} of the first KL (at most {ALIKE:.0%})")
    falls = all(sum(curve[-3:]) / 3 < curve[0] / 2 for curve in (theirs, ours))
    print(f"both halve the KL: {'yes' if falls else 'no'}")
    return 0 if gap <= SAME and apart <= ALIKE and falls else 1


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted)
    sys.exit(main())
