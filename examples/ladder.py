"""`python examples/ladder.py`: a small model climbs a ladder of tasks with tools, on your CPU, in some ten minutes.

The levels: 0a list what there is, 0b copy a number into a call, 0c choose the tool by the verb, 0d two calls. A model
that never saw these tools scores 0 and has no reward to learn from. So it first imitates solutions that the platform
knows, then learns from its own successes and failures: `palestra train keys` does both. Each level is evaluated on
tasks of neither; the untrained model is, too.
Ends with 1 if it did not get there. Interrupted, it goes on where it was: the same command again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":  # what is imported next takes seconds
    print("loading Palestra", file=sys.stderr if "--json" in sys.argv else sys.stdout, flush=True)

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from palestra.cli.progress_display import open_display, sparkline
from palestra.config import ConfigError
from palestra.config.bundled import find_config_file
from palestra.config.train import GrpoConfig, load_train_config
from palestra.runs.learning_verdict import has_learned, has_risen, judge_run
from palestra.runs.reader import RunReader, RunStatus
from palestra.runs.writer import RunFolder
from palestra.training.launch import RUN_ERRORS, check, tokenizer_folder, train

LEVELS = ("0a", "0b", "0c", "0d")
FROM_REWARDS = "0d"
"""The level that imitation hardly shows: it must rise by GRPO, too."""


class Measured(NamedTuple):
    """One evaluation."""

    when: str
    levels: dict[str, float]
    is_kept: bool = False
    """Whether it is of the weights that the run has selected."""


class Ladder:
    """Two runs of the bundled config `keys` in a folder: an evaluation of the untrained model, then all of it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.folder: Path = args.folder.absolute()
        self._args = args
        self._display = "none" if args.json else "auto"
        self._note = partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)
        self.config = self._load("keys")

    def run(self) -> None:
        """What was done before is not done again."""
        # A run that is content with any success at all evaluates, and ends.
        self._play(self._load("untrained", "imitation=null", "steps=1", "early_stop.at_least=0"))
        self._play(self.config)

    def measured(self) -> list[Measured]:
        """The untrained model, then the one that has imitated, then as it goes on."""
        untrained, *_ = self._evaluations("untrained")
        trained = self._evaluations("keys")
        names = ["imitation", *(f"GRPO {step}" for step, _ in trained[1:])]
        kept = judge_run(RunReader(self.folder / "keys")).kept_step
        return [
            Measured("untrained", untrained[1]),
            *(Measured(name, levels, step == kept) for name, (step, levels) in zip(names, trained, strict=True)),
        ]

    def _load(self, name: str, *overrides: str) -> GrpoConfig:
        own = [f"seed={self._args.seed}", f"runs={self.folder}", f"name={name}", "alias=null"]
        config = load_train_config([find_config_file("keys")], [*own, *self._args.settings, *overrides])
        assert isinstance(config, GrpoConfig)
        return config

    def _play(self, config: GrpoConfig) -> None:
        path = config.runs / str(config.name)
        if (path / "config.json").exists():
            summary = RunReader(path).read_summary()
            if summary["status"] in (RunStatus.DONE, RunStatus.STOPPED) and "error" not in summary:
                return
            run = RunFolder.open(path)
        else:
            check(config)
            run = RunFolder.create(config.runs, config.name, config, {"tokenizer": str(tokenizer_folder(config))})
        self._note(f"{run.name}: up to {config.steps} steps")
        with run, open_display(self._display, run.name, config) as listener:
            asyncio.run(train(config, run, listener))

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
        ladder.run()
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
        kept = next(one.when for one in curve if one.is_kept)
        console.print(f"[bold]{'It is up' if is_there else 'It has not got there'}[/bold], by the weights of: {kept}.")
        console.print(
            f"Everything is in {ladder.folder}; to look: palestra run show {ladder.folder / 'keys'}", soft_wrap=True
        )
    return 0 if is_there else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/ladder"), help="where everything goes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="a setting of the config, as for palestra train"
    )
    parser.add_argument("--json", action="store_true", help="the curve as one object, and nothing else")
    return parser.parse_args()


def got_there(curve: list[Measured], each: int) -> bool:
    """Whether the weights that were kept have learned every level that imitation shows, and of the other one clearly
    more than by imitation."""
    untrained, imitated, *_ = curve
    kept = next(one for one in curve if one.is_kept)
    shown = [level for level in LEVELS if level != FROM_REWARDS]
    return has_risen(imitated.levels[FROM_REWARDS], kept.levels[FROM_REWARDS], each) and all(
        has_learned(untrained.levels[level], kept.levels[level], each) for level in shown
    )


def table_of(curve: list[Measured]) -> Table:
    table = Table("level", *(one.when for one in curve), "curve")
    for level in LEVELS:
        values = tuple(one.levels[level] for one in curve)
        table.add_row(level, *(f"{value:.3f}" for value in values), sparkline(values))
    return table


if __name__ == "__main__":
    sys.exit(main())
