"""Records the trace that `prefixes.py` trains on: groups of rollouts of the shell agent, turn for turn. Minutes on two
cores; needs bubblewrap.

    python benchmarks/traces/record.py

The bundled model for the shell was taught to end after one command. So it first imitates sessions of seven commands:
drawn at random from those that fit the task, and really run. Then the agent plays a step of GRPO by itself, eight calls
of the model at most. What is kept of it are the tokens that it read and sampled, as the run's folder has them.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent / "recipes" / "ephebe")]

from shell_sessions import ENDINGS, FIRST_NUMBER, commands_for, opening, recorded  # noqa: E402  # pyright: ignore[reportMissingImports]

from palestra.agents import shell_agent  # noqa: E402
from palestra.coding.warm_up import warm_up_task, write_warm_up  # noqa: E402
from palestra.runs.reader import RunReader  # noqa: E402

TURNS = 8
SESSIONS = 320
SETTINGS: dict[str, Any] = {
    "kind": "grpo",
    "rollouts": "agent",
    "agent": {"command": ["shell", "--steps", str(TURNS)], "concurrency": 4},
    "model": {"name": "ephebe-shell", "rank": 16},
    "rollout": {"group_size": 16, "max_tokens": 64},
    "data": {"max_sequence_length": 4096, "zero_variance": "keep"},
    "optimizer": {"lr": 1e-5},
    "steps": 1,
    "eval": {"every": 0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "shell_agent.json.xz")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--imitated", type=int, default=40, help="optimizer steps of the imitation")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = play(Path(scratch), args.groups, args.imitated)
        groups = groups_of(run)
    args.out.write_bytes(lzma.compress(json.dumps(groups, separators=(",", ":")).encode(), preset=9))
    rollouts = [rollout for group in groups for rollout in group["rollouts"]]
    turns = sorted(len(rollout) for rollout in rollouts)
    print(f"{args.out}: {len(groups)} groups, {len(rollouts)} rollouts of {turns[0]} to {turns[-1]} turns")
    print(f"median {turns[len(turns) // 2]}, {args.out.stat().st_size:,} bytes")


def play(folder: Path, groups: int, imitated: int) -> RunReader:
    write_warm_up(folder / "tasks", groups)
    with (folder / "sessions.jsonl").open("w") as file:
        for number in range(SESSIONS):
            file.write(json.dumps(session(number)) + "\n")
    imitation = {
        "data": [str(folder / "sessions.jsonl")],
        "steps": imitated,
        "batch_size": 8,
        "optimizer": {"lr": 5e-3, "schedule": "linear", "warmup_steps": 5},
    }
    settings = SETTINGS | {
        "environments": [{"name": "coding", "tasks": str(folder / "tasks"), "shuffle": False}],
        "rollout": SETTINGS["rollout"] | {"groups_per_step": groups},
        "imitation": imitation,
        "runs": str(folder / "runs"),
    }
    config = folder / "trace.json"
    config.write_text(json.dumps(settings))
    subprocess.run([sys.executable, "-m", "palestra.cli", "train", str(config), "--name", "trace"], check=True)
    return RunReader(folder / "runs" / "trace")


def session(number: int) -> dict[str, Any]:
    rng, task = random.Random(f"trace {number}"), warm_up_task(FIRST_NUMBER + number)
    commands = [rng.choice(commands_for(task)).format(*task.slots) for _ in range(TURNS - 1)]
    ending = {"role": "assistant", "content": rng.choice(ENDINGS)}
    return {"messages": [*opening(task), *recorded(task, commands), ending], "tools": [shell_agent.TOOL]}


def groups_of(run: RunReader) -> list[dict[str, Any]]:
    """Each group's prompt, and of its rollouts the turns: what was read since the one before, and what was sampled."""
    groups: dict[str, dict[str, Any]] = {}
    for record in run.read_tokens(1):
        group = groups.setdefault(str(record["group"]), {"prompt": record["prompt"], "rollouts": []})
        assert group["prompt"] == record["prompt"]
        group["rollouts"].append([[turn["observation"], turn["tokens"]] for turn in record["turns"]])
    return list(groups.values())


if __name__ == "__main__":
    main()
