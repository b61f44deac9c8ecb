"""Which method finds out what a reward is due to: runs compared at equal sampled tokens, those of forks included.

    python benchmarks/credit.py --quick
    python benchmarks/credit.py --rows benchmarks/results/credit.jsonl
    python benchmarks/credit.py --worlds stockroom --methods grpo,each_turn --lrs 1e-3 --rows rows.jsonl

A row is one run of a world (`worlds/`, which do not change), a method, a learning rate and a seed. Its figure is the
number of sampled tokens after which an evaluation has reached the world's aim. Each method counts at the best of three
learning rates: the one with which most of the first two seeds arrive, of these the one with the smallest median, and
where none arrives the one with the best last reward. The other seeds are run at that rate alone. Rows are kept by a
hash of the world and of what its run's config sets, so that the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import statistics
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import msgspec
from harness import Progress, argument_parser, machine, markdown, positive, some_of, versions
from msgspec import Struct
from peers.credit_cell import WORLDS, CreditJob, CreditResult, config_of, run_cell, setting_of

from palestra.runs.record_files import LineFile, read_lines
from palestra.util.json_types import JsonObject

GRPO: dict[str, JsonObject] = {"grpo": {"algorithm": {"advantage": "grpo"}}}
STATE: JsonObject = {"algorithm": {"turns": {"compare": "state", "weight": 0.5}}}
"""GiGPO's comparison of turns that began with the same observation."""
TURN: JsonObject = {"algorithm": {"turns": {"compare": "turn", "weight": 0.5, "discount": 0.95}}}


def forking(groups: int, size: int = 8, **branch: object) -> JsonObject:
    """Fewer rollouts in a step than the other methods have, so that with the forks it samples about as many tokens."""
    return {"rollout": {"groups_per_step": groups, "group_size": size, "branch": branch}}


PLAIN: dict[str, JsonObject] = GRPO | {"mean_baseline": {}}
CHAIN_METHODS = PLAIN | {
    "each_turn": forking(1, 4, at="each_turn", width=1),
    "late": forking(1, at="fixed", turns=[7], width=2),
    "uncertain": forking(1, at="uncertain", points=1, width=2),
}
METHODS: dict[str, dict[str, JsonObject]] = {
    "chain": CHAIN_METHODS,
    "turn_rewards": GRPO | {"turn": TURN},
    "corridor": CHAIN_METHODS | {"state": STATE},
    "locks": CHAIN_METHODS,
    "stockroom": PLAIN
    | {
        "state": STATE,
        "each_turn": forking(2, at="each_turn", width=1),
        "uncertain": forking(2, at="uncertain", points=1, width=2),
    },
}
"""By world. In `chain` and `locks` all rollouts are in the same state at a turn, so that comparing states is comparing
rollouts; only `turn_rewards` rewards turns. `mean_baseline` is GRPO without the division by the standard deviation,
which the methods that give credit do not do either."""
ALL_METHODS = tuple(dict.fromkeys(chain.from_iterable(METHODS.values())))
CHAIN_LRS = (2.5e-4, 5e-4, 1e-3)
LRS = dict.fromkeys(METHODS, CHAIN_LRS) | {"stockroom": (1e-3, 2e-3, 4e-3)}
QUICK = {"worlds": ["chain"], "methods": ["grpo", "each_turn"], "lrs": [5e-4], "seeds": 1}


class CreditRow(Struct, frozen=True):
    key: str
    """Hash of the world and of what the run's config sets."""
    job: CreditJob
    result: CreditResult


def main() -> None:
    args = parse()
    file, progress = RowFile(args.rows), Progress()
    compared = jobs_of(args, range(min(args.seeds, args.rate_seeds)))
    run(compared, file, progress)
    best = {key: rows[0].job.lr for key, rows in by_method(file.rows_of(compared)).items()}
    others = jobs_of(args, range(args.rate_seeds, args.seeds))
    others = [job for job in others if job.lr == best[job.world, job.method]]
    run(others, file, progress)
    progress.done()
    rows = [row for row in file.rows_of([*compared, *others]) if row.job.lr == best[row.job.world, row.job.method]]
    print(table(rows))
    if args.curves:
        print("\n" + curves(rows))
    if args.json:
        facts = {"benchmark": "credit", "machine": machine(), "versions": versions(("palestra", "torch"))}
        print(json.dumps({**facts, "rows": summaries(rows)}))


def run(jobs: Sequence[CreditJob], file: RowFile, progress: Progress) -> None:
    left = [job for job in jobs if key_of(job) not in file.rows]
    for done, job in enumerate(left):
        progress.doing(f"{done + 1} of {len(left)}: {shown(job)}")
        row = CreditRow(key_of(job), job, asyncio.run(run_cell(job, setting_of(job.world))))
        file.add(row)
        progress.say(f"{shown(job)}: {verdict(row)}, {row.result.seconds:.0f} s")


def parse() -> argparse.Namespace:
    parser = argument_parser("credit", "Which method finds out what a reward is due to, at equal sampled tokens.")
    parser.add_argument("--worlds", type=some_of("world", tuple(WORLDS)), default=list(WORLDS), metavar="NAME,…")
    parser.add_argument("--methods", type=some_of("method", ALL_METHODS), default=ALL_METHODS, metavar="NAME,…")
    parser.add_argument("--lrs", type=numbers, metavar="X,…", help="default: three of each world")
    parser.add_argument("--seeds", type=positive, default=5, metavar="N")
    parser.add_argument("--rate-seeds", type=positive, default=2, metavar="N", help="seeds on which rates are compared")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="one row for each run; continued if it exists")
    parser.add_argument("--curves", action="store_true", help="also print the median curve of each method")
    args = parser.parse_args()
    if args.quick:
        vars(args).update(QUICK)
    return args


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def jobs_of(args: argparse.Namespace, seeds: Sequence[int]) -> list[CreditJob]:
    return [
        CreditJob(world, method, settings, lr, seed)
        for world in args.worlds
        for seed in seeds
        for lr in args.lrs or LRS[world]
        for method, settings in METHODS[world].items()
        if method in args.methods
    ]


def key_of(job: CreditJob) -> str:
    world = WORLDS[job.world]
    config = config_of(job).model_dump(mode="json", exclude_unset=True)
    text = json.dumps([config, world.budget, world.eval_tasks], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class RowFile:
    """The rows of earlier runs by their keys; new ones are added to the file at once."""

    def __init__(self, path: Path | None) -> None:
        found = read_lines(path) if path is not None and path.exists() else ()
        self.rows = {row.key: row for row in (msgspec.convert(one, CreditRow) for one in found)}
        self._file = None if path is None else LineFile(path)

    def rows_of(self, jobs: Sequence[CreditJob]) -> list[CreditRow]:
        return [self.rows[key_of(job)] for job in jobs]

    def add(self, row: CreditRow) -> None:
        self.rows[row.key] = row
        if self._file is not None:
            self._file.append(msgspec.to_builtins(row))


def tokens_to_aim(row: CreditRow) -> int | None:
    return row.result.tokens_to(WORLDS[row.job.world].success)


def by_method(rows: Sequence[CreditRow]) -> dict[tuple[str, str], list[CreditRow]]:
    """The rows of each world and method, at its best learning rate."""
    cells: dict[tuple[str, str], dict[float, list[CreditRow]]] = {}
    for row in rows:
        cells.setdefault((row.job.world, row.job.method), {}).setdefault(row.job.lr, []).append(row)
    return {key: min(rates.values(), key=badness) for key, rates in cells.items()}


def badness(rows: Sequence[CreditRow]) -> tuple[float, float, float]:
    """Smaller is better: the share of seeds that did not arrive, then the median of tokens, then the last reward."""
    arrived = [tokens for row in rows if (tokens := tokens_to_aim(row)) is not None]
    final = statistics.median(row.result.curve[-1][1] for row in rows)
    return 1 - len(arrived) / len(rows), statistics.median(arrived) if arrived else 0.0, -final


def summaries(rows: Sequence[CreditRow]) -> list[dict[str, str | int | float | None]]:
    found = by_method(rows)
    return [summary(own, found.get((world, "grpo"))) for (world, _), own in found.items()]


def summary(rows: Sequence[CreditRow], grpo: Sequence[CreditRow] | None) -> dict[str, str | int | float | None]:
    median, of_grpo = median_tokens(rows), median_tokens(grpo or ())
    forks = sum(row.result.fork_tokens for row in rows) / sum(row.result.tokens for row in rows)
    return {
        "world": rows[0].job.world,
        "method": rows[0].job.method,
        "rate": rows[0].job.lr,
        "runs": len(rows),
        "arrived": sum(tokens_to_aim(row) is not None for row in rows),
        "tokens to the aim": median,
        "of grpo's": round(median / of_grpo, 2) if median and of_grpo else None,
        "last reward": round(statistics.median(row.result.curve[-1][1] for row in rows), 3),
        "tokens of forks": f"{forks:.0%}",
    }


def median_tokens(rows: Sequence[CreditRow]) -> int | None:
    """The median over seeds, of which those that never arrive count as infinite."""
    ordered = sorted(tokens_to_aim(row) or float("inf") for row in rows)
    middle = ordered[len(ordered) // 2] if ordered else float("inf")
    return None if middle == float("inf") else int(middle)


def table(rows: Sequence[CreditRow]) -> str:
    found = summaries(rows)
    if not found:
        return "no runs"
    return markdown([tuple(found[0]), *(tuple("–" if v is None else str(v) for v in one.values()) for one in found)])


def curves(rows: Sequence[CreditRow]) -> str:
    """The median reward over seeds after shares of the tokens, of each method at its best rate."""
    shares = [eighth / 8 for eighth in range(9)]
    lines = [("world", "method", *(f"{share:.0%}" for share in shares))]
    for (world, method), own in by_method(rows).items():
        spent = [share * WORLDS[world].budget for share in shares]
        medians = [statistics.median(row.result.reward_after(tokens) for row in own) for tokens in spent]
        lines.append((world, method, *(f"{median:.2f}" for median in medians)))
    return markdown(lines)


def shown(job: CreditJob) -> str:
    return f"{job.world}, {job.method}, {job.lr:g}, seed {job.seed}"


def verdict(row: CreditRow) -> str:
    tokens, last = tokens_to_aim(row), row.result.curve[-1][1]
    return f"{'never' if tokens is None else f'{tokens:,} tokens'} to the aim, reward {last:.2f} at the end"


if __name__ == "__main__":
    main()
