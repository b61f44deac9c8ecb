"""How long it takes to learn: seconds and tokens until a model solves 90 % of held-out tasks, ours beside TRL's.

    make trl                                                   # once: TRL in .venv-trl, with the torch of .venv
    python benchmarks/time_to_reward.py --quick
    python benchmarks/time_to_reward.py --rows rows.jsonl --picture curves.svg
    python benchmarks/time_to_reward.py --who shipped,earlier --seeds 8 --rows shipped.jsonl
    python benchmarks/time_to_reward.py --device cuda --model models/ephebe-0.6b --rows gpu.jsonl

Each contender trains a LoRA adapter of the same shape on the same prompts in the same order, in a process of its own,
and stands still while its weights are evaluated: by `palestra eval`, at one server, on the same held-out tasks with the
same seeds, whoever trained them. Every evaluation is a row of the file; a run that was ended goes on with the next
cell.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
from harness import (
    Measure,
    Progress,
    Report,
    Row,
    argument_parser,
    figure,
    machine,
    missing_program,
    positive,
    report,
    some_of,
    versions,
)
from peers.reward_curves import draw
from peers.reward_job import SETTINGS, Answer, Job, Saved
from peers.reward_rows import Cell, End, Point, RowFile, best_rate, cells_of, goal_of

from palestra.checkpoints.importing import import_adapter
from palestra.config.bundled import BUNDLED, EPHEBE
from palestra.config.evaluate import load_evaluation_config
from palestra.endpoints.own_server import own_server
from palestra.evaluation.run import evaluate
from palestra.runs.listener import Silence
from palestra.runs.writer import RunFolder
from palestra.util import processes

HERE = Path(__file__).parent
OURS, TRL = "peers.ours_grpo", "peers.trl_grpo"
PROGRAMS = {"ours": OURS, "trl": TRL, "band": OURS, "replay": OURS, "shipped": OURS, "earlier": OURS}
OVERRIDES = {
    "band": ("difficulty={lowest: 0.05, highest: 0.95, by: difficulty, ema_decay: 0.8}",),
    "replay": ("difficulty={replay_share: 0.3, replay_passes: 2}",),
    "earlier": (
        *("optimizer.schedule=constant", "optimizer.warmup_steps=0", "optimizer.lr=2e-3", "algorithm.advantage=grpo"),
        *("update_guard.enabled=false", "data.min_informative_groups=0"),
    ),
}
"""Ours with tasks chosen by their difficulty, to see what that does; and the configs that ship with the recipe that
they had before runs were kept from collapsing."""
SHIPPED = ("shipped", "earlier")
"""Begin with the config that ships, as `palestra train TASK` does."""
FASTER = {"trl": 3.0}
RATES = [1e-3, 2e-3, 4e-3]
MODEL = "policy"
"""Name of the base model at the server that evaluates."""
CACHE_TOKENS = 1 << 17  # on a GPU that server must leave memory to the contenders
STOP_S = 30.0


class Figure(NamedTuple):
    what: str
    unit: str
    name: str
    """Field of a point that holds the figure."""


FIGURES = (
    Figure("training", "s", "train_s"),
    Figure("sampled", "tokens", "sampled"),
    Figure("trained", "tokens", "trained"),
    Figure("steps", "steps", "step"),
    Figure("start to first step", "s", "start_s"),
)


def main() -> None:
    args = parse()
    progress = Progress()
    with tempfile.TemporaryDirectory(prefix="time-to-reward-") as scratch:
        rows = RowFile(args.rows or Path(scratch) / "rows.jsonl")
        try:
            asyncio.run(Contest(args, rows, Path(scratch), progress).run())
        except KeyboardInterrupt:
            raise SystemExit("stopped; the same command goes on after the last run that was complete") from None
        finally:
            rows.close()
    progress.done()
    found = [row for task in args.tasks for row in table_rows(rows, args, task)]
    if args.picture:
        base = {cell.task: point for cell in cells_of(rows.rows, who="base") if (point := goal_of(rows.rows, cell))}
        draw(rows.rows, args.tasks, args.goal, base, args.picture)
    packages = ("palestra", "torch", "transformers", "peft")
    report(Report("time_to_reward", machine(), versions(packages), found, notes(rows, args)), json_line=args.json)


def parse() -> argparse.Namespace:
    parser = argument_parser("time_to_reward", "Seconds and tokens until a model has learned a task.")
    parser.add_argument("--tasks", type=some_of("task", tuple(SETTINGS)), default=list(SETTINGS), metavar="NAME,…")
    known = some_of("contender", tuple(PROGRAMS))
    parser.add_argument("--who", type=known, default=["ours", "trl"], metavar="NAME,…", help=", ".join(PROGRAMS))
    for who in ("ours", "trl"):
        parser.add_argument(f"--{who}-lr", type=numbers, default=RATES, metavar="LR,…", help="1e-3,2e-3,4e-3")
    parser.add_argument("--seeds", type=positive, default=3, metavar="N")
    parser.add_argument("--steps", type=positive, default=40, metavar="N", help="a run is given up after these")
    parser.add_argument("--limit", type=float, default=1800.0, metavar="SECONDS", help="… and after these")
    parser.add_argument("--every", type=positive, default=2, metavar="N", help="steps between evaluations")
    parser.add_argument("--goal", type=float, default=0.9, help="share of held-out tasks to be solved")
    parser.add_argument("--held-out", type=positive, default=256, metavar="N", help="tasks of an evaluation")
    parser.add_argument("--micro-batch", type=positive, default=32, metavar="N", help="rollouts of a pass of TRL's")
    parser.add_argument("--model", type=Path, default=BUNDLED / EPHEBE, metavar="FOLDER")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--trl-python", default=".venv-trl/bin/python", metavar="PROGRAM", help="a Python that has TRL (make trl)"
    )
    parser.add_argument("--rows", type=Path, metavar="FILE", help="one row for each evaluation; continued if it exists")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="the curves, as .svg or .png")
    args = parser.parse_args()
    if args.quick:
        args.seeds = 1
        args.ours_lr, args.trl_lr = ([rates[len(rates) // 2]] for rates in (args.ours_lr, args.trl_lr))
    return args


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


class Contest:
    """Trains every cell that is not in the file yet."""

    def __init__(self, args: argparse.Namespace, rows: RowFile, scratch: Path, progress: Progress) -> None:
        self._args, self._rows, self._scratch, self._progress = args, rows, scratch, progress
        self._evaluations = 0

    async def run(self) -> None:
        left = [cell for cell in self._cells() if not self._rows.is_done(cell)]
        if not left:
            return
        if any(cell.who == "trl" for cell in left) and (problem := missing_program(self._args.trl_python, "trl")):
            raise SystemExit(f"error: {problem}, or leave TRL out: --who ours")
        model, device = str(self._args.model.absolute()), self._args.device
        state, log = self._scratch / "state", self._scratch / "server.log"
        limits = [f"models.0.cache_tokens={CACHE_TOKENS}"] if device == "cuda" else []
        async with own_server(model, MODEL, state, log, self._progress.doing, device=device, settings=limits) as url:
            for number, cell in enumerate(left, 1):
                self._progress.say(f"{number} of {len(left)}: {shown(cell)}")
                if cell.who == "base":
                    await self._base(cell, url)
                else:
                    await self._train(cell, url)

    def _cells(self) -> list[Cell]:
        """By turns, so that a disturbance of the machine meets everyone."""
        args = self._args
        place = {"model": args.model.name, "device": args.device}
        rates = {who: args.trl_lr if who == "trl" else [0.0] if who in SHIPPED else args.ours_lr for who in args.who}
        trained = [
            Cell(task=task, who=who, lr=rates[who][nth], seed=seed, **place)
            for seed in range(args.seeds)
            for nth in range(max(map(len, rates.values())))
            for task in args.tasks
            for who in args.who
            if nth < len(rates[who])
        ]
        return [*(Cell(task=task, who="base", lr=0.0, seed=0, **place) for task in args.tasks), *trained]

    async def _base(self, cell: Cell, url: str) -> None:
        success = await self._success(cell, MODEL, url)
        zero = {"step": 0, "start_s": 0.0, "train_s": 0.0, "sampled": 0, "trained": 0, "reward": 0.0}
        self._rows.append(Point(cell=cell, success=success, **zero))
        self._rows.append(End(cell=cell, reached=True))
        self._progress.say(f"  untrained: {success:.3f}")

    async def _train(self, cell: Cell, url: str) -> None:
        folder = self._scratch / f"cell-{self._evaluations}"
        folder.mkdir()
        reached = False
        async with self._contender(cell, folder) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            async for line in process.stdout:
                saved = msgspec.json.decode(line, type=Saved)
                found = await asyncio.to_thread(import_adapter, saved.adapter, url, model=MODEL)
                success = await self._success(cell, found.sampler_weights, url)
                facts = {name: getattr(saved, name) for name in Saved.__struct_fields__ if name != "adapter"}
                self._rows.append(Point(cell=cell, success=success, **facts))
                self._progress.say(f"  step {saved.step}: {success:.3f} after {saved.train_s:.1f} s")
                reached = success >= self._args.goal
                if reached or saved.train_s > self._args.limit:
                    break
                process.stdin.write(msgspec.json.encode(Answer(go_on=True)) + b"\n")
            else:
                if await process.wait():
                    log = (folder / "log").read_text(errors="replace")
                    raise SystemExit(f"{shown(cell)} ended with code {process.returncode}:\n{log[-3000:]}")
        self._rows.append(End(cell=cell, reached=reached))

    @asynccontextmanager
    async def _contender(self, cell: Cell, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
        args = self._args
        job = Job(
            task=cell.task,
            model=str(args.model.absolute()),
            device=cell.device,
            lr=cell.lr,
            seed=cell.seed,
            steps=args.steps,
            every=args.every,
            folder=str(folder / "work"),
            micro_batch=args.micro_batch,
            overrides=OVERRIDES.get(cell.who, ()),
            is_shipped=cell.who in SHIPPED,
        )
        python, given = args.trl_python if cell.who == "trl" else sys.executable, os.environ.get("PYTHONPATH")
        quiet = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with (folder / "log").open("wb") as log:
            process = await processes.spawn(
                *(python, "-m", PROGRAMS[cell.who]),
                stdin=processes.PIPE,
                stdout=processes.PIPE,
                stderr=log,
                env={**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), given)))},
            )
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            yield process
        finally:
            await processes.stop(process, STOP_S)

    async def _success(self, cell: Cell, model: str, url: str) -> float:
        """Plays the held-out tasks, drawn at temperature 1 with the same seeds for everyone."""
        self._evaluations += 1
        settings = SETTINGS[cell.task]
        overrides = [
            *(f"server={url}", f"model={model}", f"tasks={self._args.held_out}", f"runs={self._scratch / 'evals'}"),
            *(f"max_tokens={settings.max_tokens}", f"max_context={settings.max_context}"),
        ]
        config = load_evaluation_config([{"name": cell.task}], [], overrides)
        with RunFolder.create(config.runs, f"eval-{self._evaluations}", config) as run:
            await evaluate(config, run, Silence(), None)
            (metrics,) = run.read_metrics()
        return float(metrics["eval/success"])


def shown(cell: Cell) -> str:
    return f"{cell.task}, {cell.who}{rate_of(cell.lr)}, seed {cell.seed}"


def rate_of(lr: float | None) -> str:
    """A config that ships has its own."""
    return f", learning rate {lr:g}" if lr else ""


def table_rows(rows: RowFile, args: argparse.Namespace, task: str) -> list[Row]:
    """Figures of ours beside those of each other, each with the learning rate that was best for it."""
    place = {"task": task, "model": args.model.name, "device": args.device}
    cells = {who: cells_of(rows.rows, who=who, **place) for who in args.who}
    rates = {who: best_rate(rows.rows, cells[who]) for who in args.who}
    goals = {
        who: [point for cell in cells[who] if cell.lr == rates[who] and (point := goal_of(rows.rows, cell))]
        for who in args.who
    }
    lead = args.who[0]
    if not goals[lead]:
        return []

    def row(figure: Figure, peer: str | None) -> Row:
        values = {
            who: Measure(tuple(float(getattr(goal, figure.name)) for goal in found)) for who, found in goals.items()
        }
        return Row(
            f"{task} to {args.goal:.0%}: {lead}, {figure.what}{rate_of(rates[lead])}",
            figure.unit,
            values[lead],
            None if peer is None else f"{peer}{rate_of(rates[peer])}",
            None if peer is None else values[peer],
            target_ratio=FASTER.get(peer or "") if figure.name == "train_s" else None,
            less_is_better=True,
        )

    peers = [who for who in args.who if who != lead and goals[who]]
    return [row(figure, peer) for peer in peers or [None] for figure in FIGURES]


def notes(rows: RowFile, args: argparse.Namespace) -> list[str]:
    found = [
        f"{args.model.name}, {args.device}: LoRA on all projections, 16 prompts x 8 rollouts a step, all on-policy",
        f"evaluated every {args.every} steps on {args.held_out} tasks at temperature 1, which is not in the seconds",
    ]
    if "trl" in args.who:
        found.append(
            f"TRL {trl_version(args.trl_python)}: samples by transformers' generate, not vLLM; {args.micro_batch} "
            "rollouts a pass; turns by rollout_func"
        )
    for task in args.tasks:
        for who in args.who:
            found += tried(rows, cells_of(rows.rows, task=task, who=who, model=args.model.name, device=args.device))
    return found


def trl_version(python: str) -> str:
    ask = [python, "-c", "from importlib.metadata import version; print(version('trl'))"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # the file has all runs, and TRL is not here
        return "of another machine"


def tried(rows: RowFile, cells: Sequence[Cell]) -> list[str]:
    """A line for each learning rate: how long each seed took."""
    found = []
    for rate in sorted({cell.lr for cell in cells}):
        goals = [goal_of(rows.rows, cell) for cell in cells if cell.lr == rate]
        seconds = ", ".join("not reached" if goal is None else f"{figure(goal.train_s)} s" for goal in goals)
        found.append(f"{cells[0].task}, {cells[0].who}{rate_of(rate)}: {seconds}")
    return found


if __name__ == "__main__":
    main()
