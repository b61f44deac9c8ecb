"""`python examples/ladder.py`: a small model climbs a ladder of tasks with tools, on your CPU, in some ten minutes.

The levels: 0a list what there is, 0b copy a number into a call, 0c choose the tool by the verb, 0d two calls. A model
that never saw these tools scores 0 and has no reward to learn from. So it first imitates solutions that the platform
knows (SFT), then learns from its own successes and failures (GRPO). Each level is evaluated on tasks of neither.
Ends with 1 if it did not get there. Interrupted, it goes on where it was: the same command again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from palestra.cli.board import open_display, sparkline
from palestra.cli.machine import best_device
from palestra.config import ConfigError
from palestra.config.bundled import find_config_file
from palestra.config.train import RunConfig, load_train_config
from palestra.environments.fleet.gold import write_gold
from palestra.environments.fleet.prompts import PromptStyle
from palestra.training.launch import RUN_ERRORS, model_folder, tokenizer_folder, train
from palestra.training.own_server import own_server
from palestra.training.run_reader import RunReader, RunStatus
from palestra.training.runs import RunFolder
from palestra.training.state import Checkpoints

LEVELS = ("0a", "0b", "0c", "0d")
WANTED = {"0a": 0.9, "0b": 0.9, "0c": 0.9}
"""At the end. Of 0d it must have become clearly more than by imitation: by two standard errors of the difference."""
SIGMAS = 2.0
HARDEST_SHARE = 0.02  # of what is imitated: two calls it has only just seen, the rest it learns from rewards


class Measured(NamedTuple):
    """One evaluation."""

    when: str
    levels: dict[str, float]


class Ladder:
    """Three runs at one server, in a folder: an evaluation of the untrained model, SFT, GRPO."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.folder: Path = args.folder.absolute()
        self._args = args
        self._display = "none" if args.json else "auto"
        self._gold = self.folder / "gold.jsonl"
        self.config = self._load("grpo")
        self._load("sft")  # what is wrong with it is said before anything is made

    async def run(self) -> None:
        """What was done before is not done again."""
        self._write_gold()
        model, state, log = self.config.model, self.folder / "engine", self.folder / "server.log"
        async with own_server(str(model_folder(model)), model.name, state, log, device=best_device()) as url:
            # A run that is content with any success at all evaluates, and ends.
            await self._play(self._load("untrained", "steps=1", "early_stop.at_least=0"), url)
            await self._play(self._load("sft"), url)
            await self._play(self._load("grpo", f"model.start_from={self._weights('sft')}"), url)

    def measured(self) -> list[Measured]:
        """The untrained model, then the one that has imitated, then as it goes on."""
        untrained, *_ = self._evaluations("untrained")
        warmed, *later = self._evaluations("grpo")
        return [
            Measured("untrained", untrained[1]),
            Measured("SFT", warmed[1]),
            *(Measured(f"GRPO {step}", levels) for step, levels in later),
        ]

    def _load(self, name: str, *overrides: str) -> Any:
        own = [f"seed={self._args.seed}", f"runs={self.folder}", f"name={name}", "alias=null"]
        if name == "sft":
            return load_train_config([find_config_file("keys-sft")], [*own, f"data={self._gold}", *self._args.sft])
        return load_train_config([find_config_file("keys")], [*own, *self._args.grpo, *overrides])

    def _write_gold(self) -> None:
        if self._gold.exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / "gold.part"
        few = max(1, round(self._args.gold * HARDEST_SHARE))
        lines = ""
        for levels, count in ((LEVELS[:-1], self._args.gold - few), (LEVELS[-1:], few)):
            write_gold(f"platform:keys?difficulty={','.join(levels)}&count={count}", part, PromptStyle.COMPACT)
            lines += part.read_text()
        part.write_text(lines)
        part.rename(self._gold)  # all of it, or none

    async def _play(self, config: RunConfig, url: str) -> None:
        config = config.model_copy(update={"server": url})
        path = config.runs / str(config.name)
        if (path / "config.json").exists():
            summary = RunReader(path).read_summary()
            if summary["status"] in (RunStatus.DONE, RunStatus.STOPPED) and "error" not in summary:
                return
            run = RunFolder.open(path)
        else:
            run = RunFolder.create(config.runs, config.name, config, {"tokenizer": str(tokenizer_folder(config))})
        with run, open_display(self._display, run.name, config) as listener:
            await train(config, run, listener, device=best_device())

    def _weights(self, name: str) -> str:
        newest = Checkpoints(self.folder / name / "checkpoints", keep=1).newest()
        assert newest is not None  # those of the last step are always kept
        return newest.address

    def _evaluations(self, name: str) -> list[tuple[int, dict[str, float]]]:
        rows = RunReader(self.folder / name).read_metrics()
        return [
            (row["step"], {level: row[f"eval/fleet_task/keys-{level}/success"] for level in LEVELS})
            for row in rows
            if "eval/success" in row
        ]


def main() -> int:
    args = parse_args()
    console = Console(highlight=False, stderr=args.json)
    try:
        ladder = Ladder(args)
        asyncio.run(ladder.run())
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here")
        return 130
    except (ConfigError, *RUN_ERRORS) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        return 1
    curve, each = ladder.measured(), ladder.config.eval.tasks // len(LEVELS)
    is_there = got_there(curve, each)
    if args.json:
        found = {"tasks_per_level": each, "temperature": ladder.config.eval.temperature, "got_there": is_there}
        print(json.dumps({**found, "curve": [one._asdict() for one in curve]}))
    else:
        console.print(table_of(curve))
        console.print(f"{each} tasks of each level, drawn at temperature {ladder.config.eval.temperature:g}.")
        console.print("[bold]It is up.[/bold]" if is_there else "[bold]It has not got there.[/bold]")
        console.print(
            f"Everything is in {ladder.folder}; to look: palestra run show {ladder.folder / 'grpo'}", soft_wrap=True
        )
    return 0 if is_there else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/ladder"), help="where everything goes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--gold", type=int, default=2000, help="solutions to imitate; one in fifty is of the last level"
    )
    parser.add_argument("--sft", action="append", default=[], metavar="KEY=VALUE", help="a setting of SFT; may repeat")
    parser.add_argument("--grpo", action="append", default=[], metavar="KEY=VALUE", help="of GRPO and the evaluations")
    parser.add_argument("--json", action="store_true", help="the curve as one object, and nothing else")
    return parser.parse_args()


def got_there(curve: list[Measured], each: int) -> bool:
    _, warmed, *_, last = curve
    errors = [one.levels["0d"] * (1 - one.levels["0d"]) / each for one in (warmed, last)]
    has_risen = last.levels["0d"] - warmed.levels["0d"] >= SIGMAS * math.sqrt(sum(errors))
    return has_risen and all(last.levels[level] > least for level, least in WANTED.items())


def table_of(curve: list[Measured]) -> Table:
    table = Table("level", *(one.when for one in curve), "curve")
    for level in LEVELS:
        values = tuple(one.levels[level] for one in curve)
        table.add_row(level, *(f"{value:.3f}" for value in values), sparkline(values))
    return table


if __name__ == "__main__":
    sys.exit(main())
