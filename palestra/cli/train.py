"""`palestra train`: run a training loop from a config file."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import rich_click as click

from palestra.cli.options import server_options
from palestra.cli.output import FAILED, INTERRUPTED, UNREACHABLE, USAGE, fail, file_errors, needs_extra, one_line_errors
from palestra.runs.control import resume_command, short_name, view_command
from palestra.runs.saved_checkpoints import selection_text
from palestra.util.json_types import JsonObject

if TYPE_CHECKING:
    from palestra.config.train import RunConfig
    from palestra.runs.writer import RunFolder

R = TypeVar("R")
DISPLAYS = ("auto", "board", "lines", "json", "none")


@click.command()
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [KEY=VALUE]...")
@click.option(
    "-c",
    "--config",
    "files",
    multiple=True,
    metavar="FILE",
    help="Further config file, merged over CONFIG; may be repeated.",
)
@click.option("--name", help="Name of the run's folder in `runs`. [two words]")
@click.option("--resume", metavar="RUN", help="Continue this run from its newest checkpoint, with its own config.")
@server_options(help="Address of a Tinker API. [a server that is started for this run]", default=None, envvar=None)
@click.option("--dry-run", is_flag=True, help="Check the config and what it names, print it, and do not train.")
@click.option(
    "--with-parent", is_flag=True, hidden=True, help="Stop when stdin closes; for processes that start this command."
)
@click.option(
    "--display",
    type=click.Choice(DISPLAYS),
    default="auto",
    help="How progress is shown; auto: a live board in a terminal, lines elsewhere.",
)
def train(
    arguments: tuple[str, ...],
    files: tuple[str, ...],
    resume: str | None,
    dry_run: bool,
    display: str,
    with_parent: bool,
    key: str | None,
    **flags: object,
) -> None:
    """Train a model by GRPO, distillation, SFT or DPO.

    CONFIG is a YAML or JSON file, or the name of a bundled config: arithmetic, demo, gym-arithmetic, keys, stockroom.
    Any setting can be given as KEY=VALUE, such as optimizer.lr=1e-4; `palestra config schema grpo` lists them all.
    """
    from palestra.environments import TaskFileError

    given = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    overrides += [f"{name}={value}" for name, value in flags.items() if value is not None]
    if key is not None:
        os.environ["TINKER_API_KEY"] = key  # all clients of a run look for it there, and it is stored in no file
    if resume and flags["name"]:
        raise fail("--resume continues an existing run; --name is for a new one", USAGE)
    if len(given) != (0 if resume else 1):
        raise fail(
            "give one CONFIG, or --resume RUN; to see a bundled config: palestra train stockroom --dry-run", USAGE
        )
    is_server_new = resume is None or any(text.startswith("server=") for text in overrides)
    if display != "none" and not dry_run:  # the next part takes seconds
        click.echo(f"reading {resume or given[0]}", err=display == "json")
    from palestra.config import ConfigError, dump_config
    from palestra.rollouts.policy_sampler import PolicyError
    from palestra.rollouts.reachability import check_server
    from palestra.runs.reader import RunError

    with one_line_errors(ConfigError, RunError, FileNotFoundError):
        config = load(given, files, overrides, resume)
    if config.server is not None and is_server_new and not dry_run:
        with one_line_errors(PolicyError, ValueError):
            check_server(config.server)
    with needs_extra("train"):
        from palestra.chat import ChatError
        from palestra.data.errors import DatasetError
        from palestra.rollouts.sources import RolloutSourceError
        from palestra.training.launch import check
    not_there = (ChatError, DatasetError, TaskFileError, RunError, RolloutSourceError)
    with one_line_errors(ValueError, code=USAGE), one_line_errors(*not_there, code=FAILED):
        check(config)
    if dry_run:
        click.echo(dump_config(config))
        return
    with one_line_errors(RunError):
        folder = open_folder(config, resume)
    with folder:
        raise SystemExit(run(config, folder, display, with_parent=with_parent))


def load(given: list[str], files: tuple[str, ...], overrides: list[str], resume: str | None) -> RunConfig:
    from palestra.config import ConfigError
    from palestra.config.bundled import find_config_file
    from palestra.config.train import load_train_config
    from palestra.runs.control import saved_to_resume

    if resume is None:
        return load_train_config([find_config_file(given[0]), *files], overrides)
    reader, saved = saved_to_resume(resume, overrides)
    rank = saved["model"]["rank"]
    config = load_train_config(files, overrides, saved)
    if config.model.rank != rank:
        raise ConfigError([f"model.rank: the adapter of {reader.name} has rank {rank}; another rank needs a new run"])
    return config


def open_folder(config: RunConfig, resume: str | None) -> RunFolder:
    from palestra.runs.writer import RunFolder
    from palestra.training.launch import tokenizer_folder

    facts = {"tokenizer": str(tokenizer_folder(config))}
    if resume is None:
        return RunFolder.create(config.runs, config.name, config, facts)
    return RunFolder.open(config.runs / (config.name or ""))


def run(
    config: RunConfig, folder: RunFolder, display: str, *, with_parent: bool = False, last: int | None = None
) -> int:
    """Trains, up to step `last` if one is given, and then says nothing about the run's end; returns the exit code."""
    from palestra.cli.progress_display import open_display
    from palestra.rollouts.policy_sampler import ServerUnreachable
    from palestra.runs.replay import StopAfter
    from palestra.training.launch import RUN_ERRORS, train

    again = f"to go on: {resume_command(folder)}"
    if display not in ("json", "none"):
        click.echo(f"to watch it in the browser: {view_command(folder)}")
    try:
        with file_errors(again), open_display(display, folder.name, config) as shown:
            listener = shown if last is None else StopAfter(shown, folder, last)
            summary = asyncio.run(until_stopped(train(config, folder, listener), with_parent))
    except (KeyboardInterrupt, asyncio.CancelledError):
        click.echo(f"stopped; {saved_text(folder)}; {again}", err=True)
        return INTERRUPTED
    except RUN_ERRORS as error:
        click.echo(f"error: {error}\n{again}", err=True)
        return UNREACHABLE if isinstance(error, ServerUnreachable) else FAILED
    if display != "json" and last is None:
        for text in last_warnings(folder):
            click.echo(f"warning: {text}")
        click.echo(closing_text(folder, summary))
    return 0


def saved_text(folder: RunFolder) -> str:
    """The step after which a resumed run goes on."""
    from palestra.runs.run_state import StateError
    from palestra.training.run_checkpoints import RunCheckpoints

    try:
        newest = RunCheckpoints(folder.path / "checkpoints", keep=1).newest()
    except StateError as error:
        return str(error)
    return "nothing was saved yet" if newest is None else f"everything up to step {newest.step} is saved"


async def until_stopped(work: Coroutine[Any, Any, R], with_parent: bool) -> R:
    """Runs until it is done. SIGTERM, which batch systems send, ends the run as Ctrl-C does; with `with_parent`, so
    does the end of stdin."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    if with_parent:
        stdin = sys.stdin.fileno()
        # readable means closed, and stays so
        loop.add_reader(stdin, lambda: (loop.remove_reader(stdin), task.cancel()))
    return await work


def closing_text(folder: RunFolder, summary: JsonObject) -> str:
    last = summary["last"]
    names = ("reward/mean", "eval/success", "loss/mean", "kl/teacher")
    figures = [f"{name} {last[name]:.3f}" for name in names if name in last]
    return (
        f"{summary['status']} after step {summary['last_step']} and {summary['seconds']:.0f} s: {', '.join(figures)}\n"
        f"everything is in {folder.path}; to look: palestra run show {short_name(folder)}, "
        f"or in the browser: {view_command(folder)}{selection_line(folder, summary)}"
    )


def last_warnings(folder: RunFolder) -> list[str]:
    """Returns what is wrong with the run at its end, in short: its advisories were printed in full when they began."""
    from palestra.runs.advisories import find_advisories
    from palestra.runs.metric_table import read_table

    found = find_advisories(read_table(folder.metrics_file), folder.read_about()["config"])
    return [one.observation for one in found]


def selection_line(folder: RunFolder, summary: JsonObject) -> str:
    """The last line, about the checkpoint that the run's name and alias mean from now on."""
    if (selected := summary.get("selected")) is None:
        return ""
    last, text = summary["last"].get(selected["metric"]), selection_text(selected)
    if last is not None and selected["step"] != summary["last_step"]:
        text += f"; the last step has {last:.3f}"
    return f"\nselected: {text}; to export it: palestra checkpoint export {short_name(folder)} DIR"
