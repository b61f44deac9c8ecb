"""Tokens trained an hour where one rollout in 32 is ten times as long as the others: rollouts that outlive their
weights, beside runs that wait for them.

    python benchmarks/stragglers.py --quick
    python benchmarks/stragglers.py --staleness 1,2,4 --rounds 3

All are asynchronous runs of `palestra train`, each with a server of its own. A model that says what a script wants
calls a tool in each of its turns, for which the rollout waits (`--tool-s`). `finish` has a fixed number of rollouts at
once (512), `continue` as many as the engine can hold; nothing else differs. The first steps are left out. Every token
counts that a step has trained, and none that was too old to be.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
from functools import partial
from pathlib import Path

from harness import Measure, Progress, Report, Row, alternate, argument_parser, machine, report, versions
from msgspec import Struct
from worlds.stragglers import FACTOR, ONE_IN, TOKENS, TURNS, Stragglers, make_model

from palestra.config.train import load_train_config
from palestra.runs.listener import Silence
from palestra.runs.writer import RunFolder
from palestra.training.launch import train
from palestra.util.json_types import JsonObject

TARGET = 1.3
WARM_UP = 4
"""Steps that are not counted."""
GROUP_SIZE, GROUPS = 8, 4
CONTEXT = 4096
WAYS: dict[str, JsonObject] = {
    "continue": {"in_flight": "continue"},
    "finish": {"in_flight": "finish"},
    "continue, keys kept": {"in_flight": "continue", "older_keys": "keep"},
}
SETTINGS: JsonObject = {
    "environments": [{"name": "worlds.stragglers:Stragglers"}],
    "data": {"zero_variance": "keep", "max_sequence_length": 4096},
    "optimizer": {"lr": 1e-6, "warmup_steps": 0, "schedule": "constant"},
    "update_guard": {"enabled": False},
    "eval": {"every": 0},
    "checkpoint": {"every": 1000},
    "keep_tokens": False,
    "alias": None,
}


class Played(Struct):
    """What the counted steps of a run did."""

    tokens_per_hour: float
    stale_share: float
    """Share of sampled tokens that were too old to be trained."""
    step_s: float
    inexact_share: float


def main() -> None:
    args = parse()
    progress, rows, notes = Progress(), [], list[str]()
    for staleness in args.staleness:
        runs: dict[str, list[Played]] = {way: [] for way in args.ways}
        contenders = {way: partial(run, way, staleness, args.steps, runs[way]) for way in args.ways}
        measured = alternate(contenders, args.rounds, progress=progress)
        for way in args.ways:
            if way != "finish":
                rows.append(row_of(way, staleness, measured))
            notes.append(note_of(way, staleness, runs[way]))
    progress.done()
    report(
        Report("stragglers", machine(), versions(("palestra", "torch")), rows, notes),
        json_line=args.json,
    )


def parse() -> argparse.Namespace:
    parser = argument_parser("stragglers", "Runs whose rollouts outlive their weights, beside runs that wait.")
    parser.add_argument(
        "--staleness", type=numbers, default=[1, 2, 4], metavar="N,…", help="asynchronous.max_staleness"
    )
    parser.add_argument("--steps", type=int, default=24, metavar="N")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS), metavar="WAY,…")
    parser.add_argument("--tool-s", type=float, default=0.2, metavar="S", help="seconds of a tool call")
    args = parser.parse_args()
    if args.quick:
        args.staleness, args.steps, args.ways = [1], 12, ["continue", "finish"]
    Stragglers.tool_s = args.tool_s
    args.rounds = args.rounds or (1 if args.quick else 3)
    return args


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def run(way: str, staleness: int, steps: int, into: list[Played]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        played = play(way, staleness, steps, Path(folder))
    into.append(played)
    return played.tokens_per_hour


def play(way: str, staleness: int, steps: int, folder: Path) -> Played:
    Stragglers.begun = itertools.count()
    rollout = {"group_size": GROUP_SIZE, "groups_per_step": GROUPS, "max_tokens": 2 * TOKENS, "max_context": CONTEXT}
    if way == "finish":
        rollout["concurrency"] = 512
    model = {"name": str(make_model(folder / "model", CONTEXT)), "rank": 4, "train_unembed": False}
    given = {"runs": str(folder), "name": "run", "steps": steps, "rollout": rollout, "model": model}
    asynchronous = {"enabled": True, "max_staleness": staleness, **WAYS[way]}
    config = load_train_config([], [], {**SETTINGS, **given, "asynchronous": asynchronous})
    with RunFolder.create(folder, "run", config) as made:
        asyncio.run(train(config, made, Silence()))
    counted = made.read_metrics()[WARM_UP:]
    seconds = sum(row["time/total_s"] for row in counted)
    trained = sum(row["batch/sampled_tokens"] for row in counted)
    stale = sum(row.get("batch/stale_tokens", 0.0) for row in counted)
    inexact = [row.get("segments/inexact_share", 0.0) for row in counted]
    return Played(
        3600 * trained / seconds, stale / (stale + trained), seconds / len(counted), sum(inexact) / len(inexact)
    )


def row_of(way: str, staleness: int, measured: dict[str, Measure]) -> Row:
    return Row(
        f"{way}, max_staleness {staleness}",
        "trained tokens/h",
        measured[way],
        "finish",
        measured.get("finish"),
        target_ratio=TARGET,
    )


def note_of(way: str, staleness: int, runs: list[Played]) -> str:
    mean = [sum(getattr(one, name) for one in runs) / len(runs) for name in ("step_s", "stale_share", "inexact_share")]
    world = f"{GROUPS} x {GROUP_SIZE} rollouts of {TURNS} turns, 1 in {ONE_IN} of {TURNS * FACTOR}"
    return (
        f"{way}, max_staleness {staleness}: {mean[0]:.2f} s a step of {world}; {mean[1]:.1%} of sampled tokens too "
        f"old, {mean[2]:.1%} inexact"
    )


if __name__ == "__main__":
    main()
