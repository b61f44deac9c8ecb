"""Whether runs hold what they have learned: shipped configs at several learning rates and seeds.

    python benchmarks/stability.py --quick
    python benchmarks/stability.py --rows benchmarks/results/stability-cpu.jsonl
    python benchmarks/stability.py --tasks stockroom --seeds 8 --factors 1 --slots 16 --rows rows.jsonl

A cell is one run of a config, a recipe, a learning rate (as a multiple of the config's) and a seed, in a process of its
own; as many run at once as there are slots. It has collapsed if its last weights solve 10 points less than its best
ones, or not 20 points more than the untrained model (of what begins above 70 %, a third of what is missing). Choosing
the best weights and ending early are off. In every second seed the first adapter is changed by 1e-6, which stands for
another machine's rounding. Rows are kept by a hash of the resolved config, so that the same command goes on where it
stopped, and a changed recipe is run anew.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from harness import Progress, argument_parser, machine, markdown, positive, some_of, versions
from msgspec import Struct
from peers.stability_cell import CellJob, CellResult, job_config

from palestra.config.cores import usable_cores
from palestra.runs.record_files import LineFile, read_lines
from palestra.util import processes

HERE = Path(__file__).parent
TASKS = ("arithmetic", "stockroom", "demo", "examples/shell_agent.yaml", "gym-arithmetic", "keys")
COMMON = ("early_stop=null", "checkpoint.select=last", "checkpoint.keep_best=null", "keep_tokens=false")
"""Judged are the weights of the last step."""
RECIPES: dict[str, tuple[str, ...]] = {
    "ours": (),
    "unguarded": ("update_guard.enabled=false",),
    "trl": (
        *("update_guard.enabled=false", "data.zero_variance=keep", "algorithm.advantage=grpo", "algorithm.loss=ppo"),
        *("optimizer.beta2=0.999", "optimizer.warmup_steps=0", "optimizer.schedule=linear", "optimizer.grad_clip=1.0"),
    ),
}
"""Ours as shipped; without the guard; and what TRL's GRPOConfig sets by default, otherwise: advantages divided by the
group's standard deviation, all groups in the batch and in its divisor, clipped ratios, betas 0.9 and 0.999, the rate
falling linearly to 0."""
EVALUATIONS = 5
LOST, GAINED = 0.10, 0.20
HIGH = 0.70
"""A config that begins above this, such as one that imitates first, must gain a third of what is missing instead."""
ENOUGH = 0.80
"""Below this, a run of arithmetic has failed, too."""


class StabilityRow(Struct, frozen=True, kw_only=True):
    key: str
    """Hash of the resolved config, and of whether the first adapter is perturbed."""
    task: str
    device: str
    recipe: str
    factor: float
    lr: float
    seed: int
    is_perturbed: bool
    result: CellResult

    @property
    def is_collapsed(self) -> bool:
        found = self.result
        gain = GAINED if found.untrained <= HIGH else (1 - found.untrained) / 3
        return found.final < found.best - LOST or found.final < found.untrained + gain


class Cell(Struct, frozen=True, kw_only=True):
    key: str
    task: str
    device: str
    recipe: str
    factor: float
    lr: float
    job: CellJob


def main() -> None:
    args = parse()
    cells, file = make_cells(args), RowFile(args.rows)
    left = [cell for cell in cells if cell.key not in file.rows]
    progress = Progress()
    if left:
        progress.say(f"{len(left)} of {len(cells)} runs to do, {args.slots} at once")
        asyncio.run(run_cells(left, args.slots, file, progress))
    progress.done()
    rows = [file.rows[cell.key] for cell in cells if cell.key in file.rows]
    print(table(rows))
    if args.json:
        facts = {"benchmark": "stability", "machine": machine(), "versions": versions(("palestra", "torch"))}
        print(json.dumps({**facts, "rows": summaries(rows)}))


def parse() -> argparse.Namespace:
    parser = argument_parser("stability", "Whether runs hold what they have learned.")
    parser.add_argument("--tasks", type=some_of("task", TASKS), default=["arithmetic", "stockroom"], metavar="NAME,…")
    parser.add_argument("--recipes", type=some_of("recipe", tuple(RECIPES)), default=["ours"], metavar="NAME,…")
    parser.add_argument("--factors", type=numbers, default=[0.5, 1.0, 2.0, 4.0], metavar="X,…", help="0.5,1,2,4")
    parser.add_argument("--seeds", type=positive, default=16, metavar="N")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--slots", type=positive, default=max(1, usable_cores() // 2), metavar="N", help="runs at once")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="one row for each run; continued if it exists")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of all runs")
    args = parser.parse_args()
    if args.quick:
        args.tasks, args.factors, args.seeds = ["arithmetic"], [1.0], 1
        args.set += ["steps=2", "eval.tasks=32", "rollout.groups_per_step=4"]
    return args


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def make_cells(args: argparse.Namespace) -> list[Cell]:
    """All seeds of a rate beside each other; the rates by turns."""
    return [
        make_cell(task, args.device, recipe, factor, seed, tuple(args.set))
        for task in args.tasks
        for recipe in args.recipes
        for seed in range(args.first_seed, args.first_seed + args.seeds)
        for factor in args.factors
    ]


def make_cell(task: str, device: str, recipe: str, factor: float, seed: int, more: tuple[str, ...]) -> Cell:
    overrides = (*COMMON, f"model.device={device}", *RECIPES[recipe], *more)
    # On a GPU a server takes half of the memory that is free, and others want to begin beside it.
    settings = ("models.0.cache_tokens=131072",) if device == "cuda" else ()
    job = CellJob(config=task, overrides=overrides, seed=seed, is_perturbed=seed % 2 == 1, settings=settings)
    stated = job_config(job, [])
    assert isinstance(stated.optimizer.lr, float), f"{task} does not state its learning rate"
    lr = stated.optimizer.lr * factor
    every = -(-stated.steps // EVALUATIONS)
    job = msgspec.structs.replace(job, overrides=(*overrides, f"optimizer.lr={lr:g}", f"eval.every={every}"))
    resolved = job_config(job, []).model_dump(mode="json", exclude={"runs", "name", "card", "server"})
    text = json.dumps([resolved, job.is_perturbed], sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Cell(key=key, task=task, device=device, recipe=recipe, factor=factor, lr=lr, job=job)


class RowFile:
    """The rows of earlier runs by their keys; new ones are added to the file at once."""

    def __init__(self, path: Path | None) -> None:
        found = read_lines(path) if path is not None and path.exists() else ()
        rows = [msgspec.convert(row, StabilityRow) for row in found]
        self.rows = {row.key: row for row in rows}
        self._file = None if path is None else LineFile(path)

    def add(self, row: StabilityRow) -> None:
        self.rows[row.key] = row
        if self._file is not None:
            self._file.append(msgspec.to_builtins(row))


async def run_cells(cells: Sequence[Cell], slots: int, file: RowFile, progress: Progress) -> None:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    shares = [tuple(cores[n::slots]) for n in range(slots)]
    waiting = iter(cells)

    async def work(share: tuple[int, ...]) -> None:
        for cell in waiting:
            result = await run_cell(cell, share, progress)
            if result is None:
                continue
            job = cell.job
            facts = {name: getattr(cell, name) for name in ("task", "device", "recipe", "factor", "lr")}
            row = StabilityRow(key=cell.key, seed=job.seed, is_perturbed=job.is_perturbed, result=result, **facts)
            file.add(row)
            progress.say(
                f"{shown(cell)}: {result.untrained:.3f} → {result.final:.3f} (best {result.best:.3f}), "
                f"{result.undone} undone, {result.kept} kept, {result.seconds:.0f} s"
                + (" COLLAPSED" if row.is_collapsed else "")
            )

    async with asyncio.TaskGroup() as tasks:
        for share in shares:
            tasks.create_task(work(share))


async def run_cell(cell: Cell, cores: tuple[int, ...], progress: Progress) -> CellResult | None:
    """None if the run failed; what it said is shown, and the others go on."""
    python_path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryFile() as log:
        process = await processes.spawn(
            *(sys.executable, "-m", "peers.stability_cell"),
            stdin=processes.PIPE,
            stdout=processes.PIPE,
            stderr=log,
            env={**os.environ, "PYTHONPATH": python_path},
        )
        job = msgspec.structs.replace(cell.job, cores=cores)
        try:
            line, _ = await process.communicate(msgspec.json.encode(job) + b"\n")
        finally:
            await processes.stop(process, 10.0)
        if not line:
            log.seek(0)
            progress.say(f"{shown(cell)} failed:\n{log.read().decode(errors='replace')[-3000:]}")
            return None
    return msgspec.json.decode(line, type=CellResult)


def shown(cell: Cell) -> str:
    return f"{cell.task}, {cell.device}, {cell.recipe}, {cell.factor:g}x ({cell.lr:g}), seed {cell.job.seed}"


def table(rows: Sequence[StabilityRow]) -> str:
    found = summaries(rows)
    return markdown([tuple(found[0]), *(tuple(map(str, one.values())) for one in found)]) if found else "no runs"


def summaries(rows: Sequence[StabilityRow]) -> list[dict[str, str | int | float]]:
    """Medians over the seeds of a config, recipe and rate."""
    groups: dict[tuple[str, str, str, float], list[StabilityRow]] = {}
    for row in rows:
        groups.setdefault((row.task, row.device, row.recipe, row.factor), []).append(row)
    return [summary(groups[key]) for key in sorted(groups)]


def summary(rows: Sequence[StabilityRow]) -> dict[str, str | int | float]:
    results, first = [row.result for row in rows], rows[0]
    return {
        "config": first.task,
        "device": first.device,
        "recipe": first.recipe,
        "rate": f"{first.lr:g} ({first.factor:g}x)",
        "runs": len(rows),
        "untrained": round(statistics.median(r.untrained for r in results), 3),
        "best": round(statistics.median(r.best for r in results), 3),
        "final": round(statistics.median(r.final for r in results), 3),
        "lowest": round(min(r.final for r in results), 3),
        "collapsed": sum(row.is_collapsed for row in rows),
        "failed": sum(row.is_collapsed or row.result.final < ENOUGH for row in rows),
        "undone": sum(r.undone for r in results),
        "seconds": round(statistics.median(r.train_s for r in results), 1),
    }


if __name__ == "__main__":
    main()
