"""`make demo`: a small agent learns to use tools, on your CPU, in a few minutes.

Starts a server with the bundled model, lets it play the stockroom, trains it by GRPO on its own successes and failures,
and shows the same task before and after. What is judged are the weights that the run has selected, the best of its
evaluations. Ends with 1 if it did not learn.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from palestra.cli.progress_display import open_display
from palestra.config.bundled import find_config_file
from palestra.config.train import GrpoConfig, load_train_config
from palestra.runs.control import view_command
from palestra.runs.learning_verdict import judge_run
from palestra.runs.reader import Part, RunReader
from palestra.runs.writer import RunFolder
from palestra.training.launch import RUN_ERRORS, tokenizer_folder, train
from palestra.util.safe_text import safe_text

STYLES = {"system": "dim", "user": "cyan", "assistant": "bold"}


def main() -> int:
    args = parse_args()
    overrides = [f"seed={args.seed}", f"runs={args.runs}", *args.overrides]
    if args.shuffled:
        overrides += ["algorithm.shuffle_rewards=true"]
    config = load_train_config([find_config_file("demo")], overrides)
    assert isinstance(config, GrpoConfig)
    console = Console(highlight=False)
    console.print(
        "A model of 4 million parameters is asked about a stockroom. It may count items and do sums with tools, but\n"
        "it often guesses. It is told nothing but whether its answer was right.\n"
    )
    with RunFolder.create(config.runs, config.name, config, {"tokenizer": str(tokenizer_folder(config))}) as run:
        console.print(f"To watch it in the browser: .venv/bin/{view_command(run)}\n", soft_wrap=True)
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the run's folder goes")
    parser.add_argument(
        "--shuffled", action="store_true", help="deal the rewards out at random: nothing can be learned"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings, as for palestra train")
    return parser.parse_args()


def tell(console: Console, run: RunFolder) -> int:
    """What came of it; 0 if it learned."""
    verdict = judge_run(run)
    if (pair := failed_then_solved(run, verdict.first_step, verdict.kept_step)) is not None:
        for title, record in zip(("before", "after"), pair, strict=True):
            console.print(Panel(transcript(record), title=f"{title}: reward {record['reward']:g}", title_align="left"))
    console.print(Text(str(verdict), "bold"))
    root = "" if run.path.parent == Path("runs").absolute() else f" --runs {run.path.parent}"
    console.print(
        f"Everything is in {run.path}\n\nTry next:\n"
        f"  .venv/bin/{view_command(run)}   # from the curve to the token, in the browser\n"
        f"  .venv/bin/palestra run show {run.name}{root}\n"
        f"  .venv/bin/palestra rollout list {run.name}{root} --where 'reward<1'\n"
        "  .venv/bin/palestra train arithmetic\n"
        "  .venv/bin/palestra env play stockroom",
        soft_wrap=True,
    )
    return 0 if verdict.has_learned else 1


def failed_then_solved(run: RunReader, first: int, last: int) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """One task, before and after; the one with the most to see."""
    before = {record["id"]: record for record in run.read_rollouts(first, Part.EVAL)}
    after = run.read_rollouts(last, Part.EVAL)
    pairs = [(before[record["id"]], record) for record in after if record["reward"] == 1 and record["id"] in before]
    turned = [pair for pair in pairs if pair[0]["reward"] == 0]
    return max(turned, key=lambda pair: pair[1]["turns"], default=None)


def transcript(record: dict[str, Any]) -> Text:
    text = Text()
    for message in record["messages"]:
        if message["role"] != "system":
            text.append(f"{message['role']:>9}  ", "dim")
            text.append(f"{safe_text(message['content'])}\n", STYLES.get(message["role"], ""))
    text.rstrip()
    return text


if __name__ == "__main__":
    sys.exit(main())
