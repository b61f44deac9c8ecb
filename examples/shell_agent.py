"""`python examples/shell_agent.py`: a small model learns to work at a shell, on your CPU, in a quarter of an hour.

The bundled `ephebe-shell` has 3.7 million parameters. It knows how the shell agent is spoken to and how commands are
written, but hardly which command an instruction asks for: the right one is 1.7 times as likely as each of eleven
others. Each episode is a sandbox with a few files, in which the agent runs whatever the model writes; hidden tests then
look at the files, and their reward is all that it learns from. It is evaluated on tasks that it never trained on. Needs
bubblewrap (apt-get install bubblewrap).
Ends with 1 if it did not learn.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from palestra.cli.progress_display import open_display, sparkline
from palestra.coding.warm_up import write_warm_up
from palestra.config.train import GrpoConfig, load_train_config
from palestra.runs.control import view_command
from palestra.runs.learning_verdict import judge_run
from palestra.runs.reader import Part
from palestra.runs.writer import RunFolder
from palestra.training.launch import RUN_ERRORS, tokenizer_folder, train

CONFIG = Path(__file__).with_suffix(".yaml")
TRAINED, HELD_OUT = 1200, 96


def main() -> int:
    args = parse_args()
    console = Console(highlight=False)
    config = load_config(args)
    console.print(
        f"{HELD_OUT} held-out tasks such as 'Rename notes.txt to final.txt.', before and after learning from rewards.\n"
    )
    with RunFolder.create(config.runs, config.name, config, {"tokenizer": str(tokenizer_folder(config))}) as run:
        try:
            with open_display("auto", run.name, config) as listener:
                asyncio.run(train(config, run, listener))
        except KeyboardInterrupt:
            console.print(f"stopped; to go on: palestra train --resume {run.path}")
            return 130
        except RUN_ERRORS as error:
            console.print(f"[red]error:[/red] {error}", soft_wrap=True)
            return 1
        return tell(console, run)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/shell-agent"), help="where everything goes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings, as for palestra train")
    return parser.parse_args()


def load_config(args: argparse.Namespace) -> GrpoConfig:
    """Writes the tasks and returns the run's config."""
    folder = args.folder.absolute()
    trained, held_out = folder / "tasks", folder / "held-out"
    write_warm_up(trained, TRAINED)
    write_warm_up(held_out, HELD_OUT, held_out=True)
    tasks = {"name": "coding", "tasks": str(trained), "eval_tasks": str(held_out), "shuffle": False}
    own = [f"environments=[{tasks}]", f"runs={folder / 'runs'}", f"seed={args.seed}"]
    config = load_train_config([CONFIG], [*own, *args.settings])
    assert isinstance(config, GrpoConfig)
    return config


def tell(console: Console, run: RunFolder) -> int:
    """What came of it; 0 if it learned."""
    verdict = judge_run(run)
    before, after = (run.read_rollouts(step, Part.EVAL) for step in (verdict.first_step, verdict.kept_step))
    for title, record in zip(("before", "after"), failed_then_solved(before, after), strict=False):
        console.print(Panel(transcript(record), title=f"{title}: reward {record['reward']:g}", title_align="left"))
    console.print(table_of(before, after))
    rewards = tuple(row["reward/mean"] for row in run.read_metrics() if "reward/mean" in row)
    console.print("rewards while training: " + " ".join(f"{one:.2f}" for one in rewards) + "  " + sparkline(rewards))
    console.print(Text(str(verdict), "bold"))
    console.print(f"Everything is in {run.path}; to look: {view_command(run)}", soft_wrap=True)
    return 0 if verdict.has_learned else 1


def failed_then_solved(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One task, before and after."""
    failed = {record["task"]: record for record in before if record["reward"] == 0 and record["turns"] > 1}
    pairs = ([failed[record["task"]], record] for record in after if record["reward"] == 1 and record["task"] in failed)
    return next(pairs, [])


def transcript(record: dict[str, Any]) -> Text:
    text = Text()
    for message in record["messages"]:
        if message["role"] != "system":
            text.append(f"{message['role']:>9}  ", "dim")
            text.append(f"{message['content']}\n")
    text.rstrip()
    return text


def table_of(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Table:
    table = Table("what is asked for", "before", "after")
    shares = [success_by_kind(records) for records in (before, after)]
    for kind in sorted(shares[0]):
        table.add_row(kind, *(f"{share[kind]:.0%}" for share in shares))
    return table


def success_by_kind(records: list[dict[str, Any]]) -> dict[str, float]:
    """Tasks are called `0-NUMBER-KIND`."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for record in records:
        rewards[record["task"].split("-")[-1]].append(record["reward"] or 0.0)
    return {kind: fmean(values) for kind, values in rewards.items()}


if __name__ == "__main__":
    sys.exit(main())
