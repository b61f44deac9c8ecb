"""`palestra judge`: how far a judge of a config agrees with answers that people have graded."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from palestra.cli.output import FAILED, NOT_FOUND, USAGE, fail, one_line_errors, print_json

if TYPE_CHECKING:
    from palestra.config.judges import JudgeConfig
    from palestra.environments.judge_check import Agreement, GoldRow
    from palestra.util.json_types import JsonObject


@click.group()
def judge() -> None:
    """Check how far a judge agrees with people."""


@judge.command()
@click.argument("arguments", nargs=-1, metavar="CONFIG [KEY=VALUE]...")
@click.option("--judge", "name", help="Name of the judge in the config. [the only one]")
@click.option(
    "--gold",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="JSONL file of graded answers. [sums that come with Palestra]",
)
@click.option(
    "--at-least",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="End with an error if fewer pairs than this are in the order of gold.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, with the judge's words.")
def check(
    arguments: tuple[str, ...], name: str | None, gold: Path | None, at_least: float | None, as_json: bool
) -> None:
    """Let a judge of CONFIG grade answers that people have graded, and compare.

    CONFIG is the YAML file of a training run or evaluation with a section `judges`. A line of the gold file is
    {"prompt": "…", "answers": [{"text": "…", "gold": 0.8}, …], "answer": "a reference"}.
    """
    from palestra.config import ConfigError
    from palestra.config.bundled import BUNDLED
    from palestra.environments import TaskFileError
    from palestra.environments.errors import JudgeError
    from palestra.environments.judge_check import read_gold

    files = [argument for argument in arguments if "=" not in argument]
    if len(files) != 1:
        raise fail("give one CONFIG with a section judges", USAGE)
    with one_line_errors(ConfigError, FileNotFoundError):
        judges = _judges(files[0], [argument for argument in arguments if "=" in argument])
    name = name or (next(iter(judges)) if len(judges) == 1 else "")
    if name not in judges:
        raise fail(f"which judge? --judge {' or '.join(judges) or 'NAME, but the config has none'}", NOT_FOUND)
    with one_line_errors(TaskFileError, JudgeError, code=FAILED):
        rows = read_gold(gold or BUNDLED / "judges" / "sums.jsonl")
        found, judged = asyncio.run(_measure(name, judges[name], rows))
    _show(found, judged, as_json)
    if at_least is not None and (found.pair_accuracy is None or found.pair_accuracy < at_least):
        raise fail(f"the judge agrees with gold on fewer than {at_least:.0%} of the pairs", FAILED)


def _judges(file: str, overrides: list[str]) -> dict[str, JudgeConfig]:
    from palestra.config.bundled import find_config_file
    from palestra.config.judges import JudgeSection
    from palestra.config.load import Layers, merge_layers, validate

    layers = Layers()
    merge_layers(layers, [find_config_file(file)], overrides)
    section = Layers()
    section.merge({"judges": layers.data.get("judges") or {}}, file)
    return validate(JudgeSection, section).judges


async def _measure(name: str, config: JudgeConfig, rows: list[GoldRow]) -> tuple[Agreement, list[JsonObject]]:
    from palestra.environments.judge import Judge
    from palestra.environments.judge_check import judge_gold

    with tempfile.TemporaryDirectory() as folder:
        nothing = Path(folder)
        async with Judge.open(name, config, nothing / "cache.jsonl", nothing / "calls.jsonl") as opened:
            return await judge_gold(opened, rows)


def _show(found: Agreement, judged: list[JsonObject], as_json: bool) -> None:
    if as_json:
        from msgspec import to_builtins

        print_json({**to_builtins(found), "judged": judged})
        return
    for one in judged:
        score = "no verdict" if one["score"] is None or one["error"] else f"{one['score']:.2f}"
        click.echo(f"{one['gold']:.2f}  {score:>10}  {' '.join(one['text'].split())[:80]}")
        if one["error"]:
            click.echo(f"      {one['error']}")
    click.echo(f"{found.answers} answers, {found.failed} without a verdict")
    if found.pair_accuracy is not None:
        click.echo(f"{found.pair_accuracy:.1%} of {found.pairs} pairs in the order of gold")
    if found.correlation is not None:
        click.echo(f"correlation {found.correlation:.2f}, mean error {found.mean_error:.2f}")
