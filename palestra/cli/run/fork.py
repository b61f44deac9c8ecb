"""`palestra run fork|replay`: a run that goes on from a checkpoint of another one, or plays its steps again."""

from __future__ import annotations

import os
from pathlib import Path

import rich_click as click
from msgspec import to_builtins

from palestra.cli.options import server_options
from palestra.cli.output import USAGE, fail, needs_extra, one_line_errors, print_json
from palestra.cli.run.common import find, json_option, run_errors, runs_option
from palestra.cli.train import DISPLAYS
from palestra.cli.train import run as run_training
from palestra.util.safe_text import safe_text

STILL = ("eval.every=0", "early_stop=null", "checkpoint.keep_best=null", "trackers=[]", "webhook=null")
"""A replay evaluates nothing and reports to no tracker: neither changes what is trained."""

display_option = click.option(
    "--display", type=click.Choice(DISPLAYS), default="auto", help="How progress is shown, as for `palestra train`."
)


@click.command()
@click.argument("which", metavar="RUN")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Step to go on after. [the newest checkpoint]")
@click.option("--name", help="Name of the new run's folder. [two words]")
@server_options(help="Address of the server that has the run's weights.", default=None, envvar=None)
@display_option
@runs_option
def fork(
    which: str,
    overrides: tuple[str, ...],
    step: int | None,
    name: str | None,
    server: str | None,
    key: str | None,
    display: str,
    root: Path,
) -> None:
    """Go on from a checkpoint of RUN as a new run, with other settings: weights, optimizer, place in the data."""
    given = [*overrides, *([f"server={server}"] if server is not None else [])]
    raise SystemExit(run_fork(which, step, given, name, key, display, root))


@click.command()
@click.argument("which", metavar="RUN")
@click.option("--steps", required=True, metavar="A..B", help="Steps to play and train again, such as 30..40.")
@click.option(
    "--change",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting that the replay has otherwise, such as reward=module:function; may be repeated.",
)
@click.option("--name", help="Name of the replay's folder. [RUN-replay-A-B]")
@server_options(help="Address of the server that has the run's weights.", default=None, envvar=None)
@display_option
@runs_option
@json_option
def replay(
    which: str,
    steps: str,
    changes: tuple[str, ...],
    name: str | None,
    server: str | None,
    key: str | None,
    display: str,
    root: Path,
    as_json: bool,
) -> None:
    """Play and train recorded steps of RUN again, as a run of its own, and say where the first bit differs."""
    if any("=" not in change for change in changes):
        raise fail("--change is KEY=VALUE, as in --change reward=module:function", USAGE)
    with run_errors():
        from palestra.runs.reader import find_run
        from palestra.runs.replay import compare_replay, parse_steps

        original = find(which, root)
        first, last = parse_steps(steps)
    name = name or f"{original.name}-replay-{first}-{last}"
    given = [*STILL, *changes, *([f"server={server}"] if server is not None else [])]
    shown = "none" if as_json and display == "auto" else display
    code = run_fork(which, first - 1, given, name, key, shown, root, last)
    if code:
        raise SystemExit(code)
    with run_errors():
        found = compare_replay(original, find_run(name, original.path.parent), first, last)
    if as_json:
        print_json({"run": name, "changes": list(changes), "comparisons": to_builtins(found)})
        return
    for one in found:
        if one.first is None:
            text = f"the same ({one.compared} compared)" if one.compared else "nothing to compare"
        else:
            at = f"step {one.first.step}, {one.first.where}"
            text = f"first differ at {at}: {_short(one.first.original)} was {_short(one.first.replay)} in the replay"
        click.echo(f"{one.what}: {text}")


def run_fork(
    which: str,
    step: int | None,
    overrides: list[str],
    name: str | None,
    key: str | None,
    display: str,
    root: Path,
    last: int | None = None,
) -> int:
    """Makes the new run and trains it, up to step `last`; returns the exit code."""
    if key is not None:
        os.environ["TINKER_API_KEY"] = key
    with needs_extra("train"):
        from palestra.chat import ChatError
        from palestra.config import ConfigError
        from palestra.runs.fork import make_fork, plan_fork
        from palestra.training.launch import check
    with run_errors(), one_line_errors(ConfigError, ChatError, ValueError):
        parent = find(which, root)
        step, config = plan_fork(parent, step, overrides, name)
        check(config)
        folder = make_fork(parent, step, config)
    with folder:
        return run_training(config, folder, display, last=last)


def _short(value: object) -> str:
    text = safe_text(str(value), keep="")
    return text if len(text) <= 60 else f"{text[:60]}…"
